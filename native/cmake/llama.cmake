# llama.cpp as a subproject: its source (see llama_source.py), its options, the libraries that we ship.
#
# Sets LLAMA_SOURCE_DIR and PYORCH_LIBRARIES; defines the functions that install its converter, bindings and licences.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

set(LLAMA_SOURCE_DIR "${CMAKE_BINARY_DIR}/llama.cpp")
set(PYORCH_PATCH_DIR "${CMAKE_CURRENT_LIST_DIR}/../../patches")

# An edited, added or removed patch configures again, and only that renews the tree.
file(GLOB PYORCH_PATCHES CONFIGURE_DEPENDS "${PYORCH_PATCH_DIR}/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${PYORCH_PATCHES}
    "${CMAKE_CURRENT_LIST_DIR}/llama_source.py"
    "${CMAKE_CURRENT_LIST_DIR}/llama-cpp-python.txt")

execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/llama_source.py" tree "${LLAMA_SOURCE_DIR}"
        --patches "${PYORCH_PATCH_DIR}"
    RESULT_VARIABLE failed)
if(failed)
    message(FATAL_ERROR "the llama.cpp source could not be prepared: the reason is printed above")
endif()

# The Python bindings of exactly this llama.cpp, beside the libraries that they load. llama-cpp-python is no dependency:
# its installation would build llama.cpp a second time.
set(LLAMA_BINDINGS_DIR "${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/bindings")
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/llama_source.py" bindings "${LLAMA_BINDINGS_DIR}"
    RESULT_VARIABLE failed)
if(failed)
    message(FATAL_ERROR "the bindings of llama.cpp could not be prepared: the reason is printed above")
endif()

# The server and the multimodal library are the parts of tools/ that we ship; the executables there
# are configured but never built (EXCLUDE_FROM_ALL below).
set(BUILD_SHARED_LIBS        ON)
set(LLAMA_BUILD_COMMON       ON)
set(LLAMA_BUILD_TOOLS        ON)
set(LLAMA_BUILD_SERVER       ON)
set(LLAMA_BUILD_TESTS        OFF)
set(LLAMA_BUILD_EXAMPLES     OFF)
set(LLAMA_BUILD_APP          OFF)
set(LLAMA_BUILD_UI           OFF) # see PYORCH_CHAT_PAGE
set(LLAMA_USE_PREBUILT_UI    OFF) # else the build downloads it
set(LLAMA_ALL_WARNINGS       OFF)
# Kernels for the processor at hand, or several libraries of them, of which each processor loads the one that suits it.
option(PYORCH_PORTABLE "CPU kernels for every processor of this architecture, chosen when they are loaded" OFF)
if(PYORCH_PORTABLE)
    set(GGML_NATIVE           OFF)
    set(GGML_BACKEND_DL       ON)
    set(GGML_CPU_ALL_VARIANTS ON)
    # Those that many processors have, and those whose instructions speed up what models of experts compute. A processor
    # between two of them takes the one below.
    if(DEFINED GGML_CPU_VARIANTS)
    elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
        set(GGML_CPU_VARIANTS x64 sse42 sandybridge haswell alderlake skylakex cascadelake icelake zen4)
    elseif(CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
        set(GGML_CPU_VARIANTS armv8.0_1 armv8.2_2 armv8.6_1 armv8.6_2)
    endif()
endif()
# A device behind a socket: another machine's, and the one that tests of the device tier have everywhere.
set(GGML_RPC      ON)
set(GGML_RPC_RDMA OFF) # whether it is there must not depend on the machine
# Models are local files: nothing here needs TLS, and the wheel needs no system library for it.
option(LLAMA_OPENSSL "llama: use openssl to support HTTPS" OFF)
# The tree is no git checkout: without these it takes the commit of the repository around it for its
# own, and every commit there would compile it again.
set(LLAMA_BUILD_NUMBER       0)
set(LLAMA_BUILD_COMMIT       "pyorch")
set(ENV{GIT_CEILING_DIRECTORIES} "${CMAKE_BINARY_DIR}")

# The chat page of llama-server, where scripts/build_chat_page.py has built it: the library then holds its files.
set(PYORCH_CHAT_PAGE "${CMAKE_CURRENT_LIST_DIR}/../../build/chat-page" CACHE PATH
    "directory of the chat page, as `make chat-page` writes it; none: the server has no chat page")
file(REMOVE_RECURSE "${LLAMA_SOURCE_DIR}/tools/ui/dist")
set(LLAMA_HAS_CHAT_PAGE OFF)
if(EXISTS "${PYORCH_CHAT_PAGE}/SOURCE")
    file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/llama-cpp-python.txt" pinned REGEX "^llama-cpp-python==")
    file(STRINGS "${PYORCH_CHAT_PAGE}/SOURCE" built)
    if(built STREQUAL pinned)
        set(LLAMA_HAS_CHAT_PAGE ON)
        file(COPY "${PYORCH_CHAT_PAGE}/dist" DESTINATION "${LLAMA_SOURCE_DIR}/tools/ui")
    else()
        message(WARNING "the chat page in ${PYORCH_CHAT_PAGE} is of another llama.cpp and left out: run `make chat-page`")
    endif()
endif()

add_subdirectory("${LLAMA_SOURCE_DIR}" "${CMAKE_BINARY_DIR}/llama.cpp-build" EXCLUDE_FROM_ALL)

# Without AMX, which -march=native turns on: docs/reference/seam.md has what goes wrong with it.
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-amx-int8 PYORCH_HAS_NO_AMX)
if(TARGET ggml-cpu AND PYORCH_HAS_NO_AMX)
    target_compile_options(ggml-cpu PRIVATE -mno-amx-int8)
endif()

set(PYORCH_LIBRARIES llama llama-common llama-server-impl mtmd ggml ggml-base)

# The backends that llama.cpp's options selected.
get_property(backend_dirs DIRECTORY "${LLAMA_SOURCE_DIR}/ggml/src" PROPERTY SUBDIRECTORIES)
foreach(dir IN LISTS backend_dirs ITEMS "${LLAMA_SOURCE_DIR}/ggml/src")
    get_property(targets DIRECTORY "${dir}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        if(target MATCHES "^ggml-" AND type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            list(APPEND PYORCH_LIBRARIES ${target})
        endif()
    endforeach()
endforeach()
list(REMOVE_DUPLICATES PYORCH_LIBRARIES)

# llama.cpp's checkpoint converter with the gguf package of the same revision, run as a child process.
function(install_llama_converter destination component)
    install(FILES "${LLAMA_SOURCE_DIR}/convert_hf_to_gguf.py"
        DESTINATION "${destination}" COMPONENT ${component})
    install(DIRECTORY "${LLAMA_SOURCE_DIR}/conversion" "${LLAMA_SOURCE_DIR}/gguf-py"
        DESTINATION "${destination}" COMPONENT ${component}
        PATTERN "__pycache__" EXCLUDE)
    # Mistral checkpoints without a chat template take one of these.
    install(DIRECTORY "${LLAMA_SOURCE_DIR}/models/templates"
        DESTINATION "${destination}/models" COMPONENT ${component})
endfunction()

# The package llama_cpp, and a line for Python's path, so that it is found before pyorch is imported, too.
function(install_llama_bindings destination component)
    install(DIRECTORY "${LLAMA_BINDINGS_DIR}/llama_cpp"
        DESTINATION "${destination}" COMPONENT ${component}
        PATTERN "__pycache__" EXCLUDE)
    file(WRITE "${CMAKE_BINARY_DIR}/pyorch-llama-cpp.pth" "${destination}\n")
    install(FILES "${CMAKE_BINARY_DIR}/pyorch-llama-cpp.pth" DESTINATION . COMPONENT ${component})
endfunction()

# The notices of everything compiled into the libraries: files where there are files, else the passage
# of the source that states the licence.
function(install_llama_licenses destination component)
    set(notices "${CMAKE_BINARY_DIR}/licenses")
    file(REMOVE_RECURSE "${notices}")
    configure_file("${LLAMA_SOURCE_DIR}/LICENSE" "${notices}/LICENSE-llama.cpp" COPYONLY)
    configure_file("${LLAMA_BINDINGS_DIR}/LICENSE.md" "${notices}/LICENSE-llama-cpp-python" COPYONLY)
    file(GLOB files "${LLAMA_SOURCE_DIR}/licenses/LICENSE-*")
    foreach(file IN LISTS files)
        cmake_path(GET file FILENAME name)
        configure_file("${file}" "${notices}/${name}" COPYONLY)
    endforeach()
    file(GLOB files "${LLAMA_SOURCE_DIR}/vendor/*/LICENSE*" "${LLAMA_SOURCE_DIR}/vendor/*/*/LICENSE*")
    foreach(file IN LISTS files)
        cmake_path(GET file PARENT_PATH folder)
        cmake_path(GET folder FILENAME project)
        configure_file("${file}" "${notices}/LICENSE-${project}" COPYONLY)
    endforeach()

    if(LLAMA_HAS_CHAT_PAGE)
        configure_file("${PYORCH_CHAT_PAGE}/LICENSE-chat-page" "${notices}/LICENSE-chat-page" COPYONLY)
    endif()

    write_notice("${notices}/LICENSE-base64"     common/base64.hpp "This is free and unencumbered" "*/")
    write_notice("${notices}/LICENSE-llamafile"  ggml/src/ggml-cpu/llamafile/sgemm.cpp "// Copyright 2024 Mozilla" "\n\n")
    write_notice("${notices}/LICENSE-miniaudio"  vendor/miniaudio/miniaudio.h "This software is available as a choice" "*/")
    write_notice("${notices}/LICENSE-stb"        vendor/stb/stb_image.h "This software is available under 2 licenses" "*/")
    write_notice("${notices}/LICENSE-subprocess" vendor/sheredom/subprocess.h "This is free and unencumbered" "*/")
    write_notice("${notices}/LICENSE-yarn"       ggml/src/ggml-cpu/ops.cpp "// MIT licensed. Copyright" "\n")

    if(PYORCH_PORTABLE AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
        write_libgomp_notice("${notices}/LICENSE-libgomp")
    endif()

    if(GGML_VULKAN) # whose headers in C++ are compiled in: "Apache-2.0 OR MIT"
        file(STRINGS "${Vulkan_INCLUDE_DIR}/vulkan/vulkan.hpp" copyright REGEX "Copyright .*Khronos" LIMIT_COUNT 1)
        string(REGEX REPLACE "^[ /*]*" "" copyright "${copyright}")
        file(READ "${LLAMA_SOURCE_DIR}/LICENSE" mit)
        string(REGEX REPLACE "Copyright[^\n]*" "${copyright}" mit "${mit}")
        file(WRITE "${notices}/LICENSE-vulkan-headers" "${mit}")
    endif()

    install(DIRECTORY "${notices}/" DESTINATION "${destination}" COMPONENT ${component})
endfunction()

# A wheel for other machines is given this compiler's runtime of OpenMP: its notice, as the system's package has it.
function(write_libgomp_notice target)
    set(notice "")
    foreach(file IN ITEMS /usr/share/doc/libgomp1/copyright /usr/share/common-licenses/GPL-3 # Debian
            /usr/share/licenses/libgomp/COPYING.RUNTIME /usr/share/licenses/libgomp/COPYING3) # Fedora
        if(EXISTS "${file}")
            file(READ "${file}" text)
            string(APPEND notice "${text}\n")
        endif()
    endforeach()
    if(notice)
        file(WRITE "${target}" "${notice}")
    endif()
endfunction()

# Writes the part of a source file of llama.cpp from the text begin up to the text end.
function(write_notice target source begin end)
    file(READ "${LLAMA_SOURCE_DIR}/${source}" text)
    string(FIND "${text}" "${begin}" start)
    if(start EQUAL -1)
        message(FATAL_ERROR "${source} no longer states its licence with \"${begin}\"")
    endif()
    string(SUBSTRING "${text}" ${start} -1 text)
    string(FIND "${text}" "${end}" length)
    string(SUBSTRING "${text}" 0 ${length} text)
    file(WRITE "${target}" "${text}\n")
endfunction()
