// The prefetch controller under synthetic token times: prints the share of tokens with prefetch on.
//
//     controller_test N TIME_ON TIME_OFF [N TIME_ON TIME_OFF]...
//
// Times are in ms; each triple is a regime of N tokens. Times of single tokens vary by a third, as real ones do.

#include "prediction/prefetch_controller.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

int main(int argc, char ** argv) {
    pyorch::PrefetchController controller;
    std::mt19937 rng(7);
    std::normal_distribution<double> noise(1, 0.33);
    for (int i = 1; i + 2 < argc; i += 3) {
        const int n  = atoi(argv[i]);
        int       on = 0;
        for (int t = 0; t < n; ++t) {
            on += controller.on();
            const double ms = atof(argv[controller.on() ? i + 1 : i + 2]);
            controller.token(ms / 1000 * std::max(0.2, noise(rng)));
            if (t % 500 == 250) {
                controller.token(60); // a pause between two requests
            }
        }
        printf("%.3f\n", (double) on / n);
    }
}
