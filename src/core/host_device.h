// Functions that host and device code share. A constexpr function needs no mark.
#pragma once

#if defined(__CUDACC__)
#define FOVEA_HOST_DEVICE __host__ __device__
#else
#define FOVEA_HOST_DEVICE
#endif
