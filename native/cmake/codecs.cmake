# zstd and lz4 as static libraries inside libpyorch: their sources (see codec_sources.py), or the system's.
#
# Defines the target pyorch-codecs and the function that adds their licences to those of the wheel.

option(PYORCH_SYSTEM_CODECS "link the zstd and lz4 of the system" OFF)

add_library(pyorch-codecs INTERFACE)

if(PYORCH_SYSTEM_CODECS)
    foreach(name IN ITEMS zstd lz4)
        find_path(PYORCH_${name}_INCLUDE ${name}.h REQUIRED)
        find_library(PYORCH_${name}_LIBRARY ${name} REQUIRED)
        target_include_directories(pyorch-codecs INTERFACE "${PYORCH_${name}_INCLUDE}")
        target_link_libraries(pyorch-codecs INTERFACE "${PYORCH_${name}_LIBRARY}")
    endforeach()
else()
    set(CODEC_SOURCE_DIR "${CMAKE_BINARY_DIR}/codecs")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        "${CMAKE_CURRENT_LIST_DIR}/codec_sources.py"
        "${CMAKE_CURRENT_LIST_DIR}/zstandard.txt"
        "${CMAKE_CURRENT_LIST_DIR}/lz4.txt")
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/codec_sources.py" "${CODEC_SOURCE_DIR}"
        RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "the sources of zstd and lz4 could not be prepared: the reason is printed above")
    endif()

    # Another zstd or lz4 in the process, such as Python's, must not be taken for these: nothing of them is exported.
    add_library(pyorch-codecs-static STATIC
        "${CODEC_SOURCE_DIR}/zstd/zstd.c" "${CODEC_SOURCE_DIR}/lz4/lz4.c" "${CODEC_SOURCE_DIR}/lz4/lz4hc.c")
    set_target_properties(pyorch-codecs-static PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
    target_compile_definitions(pyorch-codecs-static PRIVATE ZSTDLIB_VISIBLE= ZSTDERRORLIB_VISIBLE= LZ4LIB_VISIBILITY=)
    target_include_directories(pyorch-codecs-static PUBLIC "${CODEC_SOURCE_DIR}/zstd" "${CODEC_SOURCE_DIR}/lz4")
    target_link_libraries(pyorch-codecs INTERFACE pyorch-codecs-static)
endif()

# REQUIRES that install_llama_licenses() was called: it empties the folder.
function(install_codec_licenses destination component)
    if(PYORCH_SYSTEM_CODECS)
        return()
    endif()
    configure_file("${CODEC_SOURCE_DIR}/zstd/LICENSE" "${CMAKE_BINARY_DIR}/licenses/LICENSE-zstd" COPYONLY)
    write_notice("${CMAKE_BINARY_DIR}/licenses/LICENSE-lz4" "${CODEC_SOURCE_DIR}/lz4/lz4.c"
        "   Copyright (C)" "   You can contact")
endfunction()
