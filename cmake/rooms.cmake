# How a room (a folder of src/) becomes part of a library, and its tests a program.

# Compile options of every target of this project.
add_library(fovea_options INTERFACE)
target_compile_features(fovea_options INTERFACE cxx_std_20)
# Contraction would make a * b + c depend on the instruction set; kernels ask for FMA by name.
target_compile_options(fovea_options INTERFACE
                       $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -ffp-contract=off>)
if(FOVEA_WERROR)
  target_compile_options(fovea_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(FOVEA_SANITIZE)
  target_compile_options(fovea_options INTERFACE -fsanitize=${FOVEA_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(fovea_options INTERFACE -fsanitize=${FOVEA_SANITIZE})
endif()

# fovea_room(<name> SOURCES <file>...): an object library room_<name>. Private includes of other
# rooms are written from src/, as in "core/check.h"; tests/include_check.py holds them to the table.
function(fovea_room name)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  add_library(room_${name} OBJECT ${ARG_SOURCES})
  set_target_properties(room_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(room_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include
                             PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(room_${name} PRIVATE fovea_options fmt::fmt-header-only
                        nlohmann_json::nlohmann_json)
endfunction()

# fovea_library(<name> ROOMS <room>... LINK <library>...): library target <name>.
function(fovea_library name)
  cmake_parse_arguments(ARG "" "" "ROOMS;LINK" ${ARGN})
  add_library(${name})
  foreach(room IN LISTS ARG_ROOMS)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:room_${room}>)
  endforeach()
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION})
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${name} ${ARG_LINK})
  if(FOVEA_SANITIZE)
    target_link_options(${name} PUBLIC -fsanitize=${FOVEA_SANITIZE})
  endif()
endfunction()

# fovea_test(<room> SOURCES <file>... LINK <library>...): program fovea_<room>_tests, its cases
# registered one by one. Tests may include anything.
function(fovea_test room)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(fovea_${room}_tests ${ARG_SOURCES})
  target_include_directories(fovea_${room}_tests PRIVATE ${PROJECT_SOURCE_DIR}/include
                             ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(fovea_${room}_tests PRIVATE
                             FOVEA_TEST_DATA="${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(fovea_${room}_tests PRIVATE fovea_options ${ARG_LINK} GTest::gtest
                        GTest::gtest_main fmt::fmt-header-only nlohmann_json::nlohmann_json)
  gtest_discover_tests(fovea_${room}_tests TEST_PREFIX ${room}/ DISCOVERY_TIMEOUT 60
                       PROPERTIES TIMEOUT 300)
endfunction()

# fovea_test_on_device(<room>): its tests run on a GPU too, where the build and the machine have one.
function(fovea_test_on_device room)
  if(FOVEA_CUDA)
    target_sources(fovea_${room}_tests PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/cuda_memory.cc)
    target_link_libraries(fovea_${room}_tests PRIVATE CUDA::cudart_static)
  endif()
endfunction()
