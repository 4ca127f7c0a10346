# Instruction set units: the only sources that are built for more than the baseline processor.

# fovea_isa_source(<file> <flag>...): <file> of the current folder may use what the flags allow. Its
# kernels are register tiles: full unrolling (-O3) decides whether these stay in registers.
function(fovea_isa_source file)
  set(options ${ARGN} -fno-exceptions)
  if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT FOVEA_SANITIZE)
    list(APPEND options -O3)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC bug 105593: AVX-512 intrinsics warn about their own undefined operands.
    list(APPEND options -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${options}")
endfunction()
