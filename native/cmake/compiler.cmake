# Compiler settings that hold for llama.cpp and libpyorch alike.

# A sanitizer sees races and overruns only where both sides of a call are instrumented.
if(PYORCH_SANITIZE STREQUAL "address")
    add_compile_options(-fsanitize=address,undefined -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=address,undefined)
elseif(PYORCH_SANITIZE STREQUAL "thread")
    add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=thread)
    # The OpenMP runtime is not instrumented: its barriers would all be reported as races.
    set(GGML_OPENMP OFF CACHE BOOL "ggml: use OpenMP" FORCE)
elseif(PYORCH_SANITIZE)
    message(FATAL_ERROR "PYORCH_SANITIZE is \"${PYORCH_SANITIZE}\": use address or thread, or leave it empty")
endif()

# ggml's assertions print __FILE__: keep the builder's directories out of the libraries.
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fmacro-prefix-map=${CMAKE_BINARY_DIR}/=>")
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fmacro-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=>")
endif()

# ggml would put ccache in front of every command and warn where there is none.
set(GGML_CCACHE OFF CACHE BOOL "ggml: use ccache if available" FORCE)
find_program(PYORCH_CCACHE ccache)
if(PYORCH_CCACHE)
    foreach(language IN ITEMS C CXX)
        if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
            set(CMAKE_${language}_COMPILER_LAUNCHER "${PYORCH_CCACHE}")
        endif()
    endforeach()
endif()
