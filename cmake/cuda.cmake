# Rooms with CUDA sources, of -DFOVEA_CUDA=ON.

enable_language(CUDA)
find_package(CUDAToolkit 13 REQUIRED)

# fovea_cuda_room(<room> <architecture>...): its .cu files are built for these. constexpr functions
# of core and variants serve the device too.
function(fovea_cuda_room room)
  set_target_properties(room_${room} PROPERTIES CUDA_ARCHITECTURES "${ARGN}")
  # CMake 3.25 does not know how to ask nvcc 13 for C++20.
  target_compile_options(room_${room} PRIVATE
                         "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-O3>")
  target_link_libraries(room_${room} PRIVATE CUDA::cudart_static)
endfunction()
