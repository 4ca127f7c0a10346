# Rooms with CUDA sources, of -DFOVEA_CUDA=ON.

enable_language(CUDA)
find_package(CUDAToolkit 13 REQUIRED)

# Only cuBLASLt's header: the library is opened where a model first needs it. It is part of the
# toolkit or of the wheel nvidia-cublas. Without it everything but models is built.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  set(wheel_include_dir ${Python3_SITELIB}/nvidia/cu13/include)
endif()
find_path(FOVEA_CUBLASLT_INCLUDE_DIR cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS}
          ${wheel_include_dir} DOC "Folder of cublasLt.h")
if(NOT FOVEA_CUBLASLT_INCLUDE_DIR)
  message(STATUS "cublasLt.h not found: models cannot run on a GPU; pip install nvidia-cublas")
endif()

# fovea_cuda_room(<room> <architecture>...): its .cu files are built for these. constexpr functions
# of core and variants serve the device too.
function(fovea_cuda_room room)
  set_target_properties(room_${room} PROPERTIES CUDA_ARCHITECTURES "${ARGN}")
  # CMake 3.25 does not know how to ask nvcc 13 for C++20.
  target_compile_options(room_${room} PRIVATE
                         "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-O3>")
  target_link_libraries(room_${room} PRIVATE CUDA::cudart_static)
endfunction()
