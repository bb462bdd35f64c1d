// A test program: claims, each of which holds or ends the program.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>

#define CHECK(x)                                                                                                       \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x);                                      \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

namespace pyorch {

// Of a file that claims may write: what the program was called with.
inline std::string path;

// main() of a program that is called with that path.
inline int run(int argc, char ** argv, std::initializer_list<void (*)()> claims) {
    CHECK(argc == 2);
    path = argv[1];
    for (auto * claim : claims) {
        claim();
    }
    return 0;
}

} // namespace pyorch
