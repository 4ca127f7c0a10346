# Every third-party look-up. fovea::ops needs only header-only fmt and nlohmann-json, privately.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json 3 REQUIRED)

if(FOVEA_ONEDNN AND NOT FOVEA_OPS_ONLY)
  find_package(oneDNN REQUIRED) # 2.6 (Debian 12) or 3.x: src/linear/onednn.cc hides the difference
  find_package(OpenMP REQUIRED COMPONENTS CXX)
endif()
if(FOVEA_TOOLS AND NOT FOVEA_OPS_ONLY)
  find_package(CLI11 REQUIRED)
endif()
if(FOVEA_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()
