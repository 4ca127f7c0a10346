# find_package(fovea): targets fovea::ops, fovea::oracle and, where built, fovea::fovea.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)

# fovea_export(<target> <name>): installed as fovea::<name>, in an export set of its own, so that
# who uses the kernels alone needs nothing that the others link.
function(fovea_export target name)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS ${target} EXPORT fovea-${name})
  install(EXPORT fovea-${name} NAMESPACE fovea:: DESTINATION ${package_dir})
endfunction()

fovea_export(fovea_ops ops)
fovea_export(fovea_oracle oracle)
if(TARGET fovea)
  fovea_export(fovea fovea)
endif()
install(DIRECTORY include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)

configure_package_config_file(cmake/fovea-config.cmake.in ${PROJECT_BINARY_DIR}/fovea-config.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fovea-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fovea-config.cmake
              ${PROJECT_BINARY_DIR}/fovea-config-version.cmake
              cmake/FindoneDNN.cmake DESTINATION ${package_dir})
