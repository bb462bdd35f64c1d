# zstd as a static library inside libpyorch: its source (see zstd_source.py), or the system's library.
#
# Defines the target pyorch-codecs and the function that adds its licence to those of the wheel.

option(PYORCH_SYSTEM_CODECS "link the zstd of the system" OFF)

add_library(pyorch-codecs INTERFACE)

if(PYORCH_SYSTEM_CODECS)
    find_path(PYORCH_zstd_INCLUDE zstd.h REQUIRED)
    find_library(PYORCH_zstd_LIBRARY zstd REQUIRED)
    target_include_directories(pyorch-codecs INTERFACE "${PYORCH_zstd_INCLUDE}")
    target_link_libraries(pyorch-codecs INTERFACE "${PYORCH_zstd_LIBRARY}")
else()
    set(ZSTD_SOURCE_DIR "${CMAKE_BINARY_DIR}/codecs/zstd")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        "${CMAKE_CURRENT_LIST_DIR}/zstd_source.py"
        "${CMAKE_CURRENT_LIST_DIR}/zstandard.txt")
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/zstd_source.py" "${ZSTD_SOURCE_DIR}"
        RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "the source of zstd could not be prepared: the reason is printed above")
    endif()

    # Another zstd in the process, such as Python's, must not be taken for this one: nothing of it is exported.
    add_library(pyorch-codecs-static STATIC "${ZSTD_SOURCE_DIR}/zstd.c")
    set_target_properties(pyorch-codecs-static PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
    target_compile_definitions(pyorch-codecs-static PRIVATE ZSTDLIB_VISIBLE= ZSTDERRORLIB_VISIBLE=)
    target_include_directories(pyorch-codecs-static PUBLIC "${ZSTD_SOURCE_DIR}")
    target_link_libraries(pyorch-codecs INTERFACE pyorch-codecs-static)
endif()

# REQUIRES that install_llama_licenses() was called: it empties the folder.
function(install_codec_licenses)
    if(NOT PYORCH_SYSTEM_CODECS)
        configure_file("${ZSTD_SOURCE_DIR}/LICENSE" "${CMAKE_BINARY_DIR}/licenses/LICENSE-zstd" COPYONLY)
    endif()
endfunction()
