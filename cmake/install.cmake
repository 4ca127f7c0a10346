# find_package(fovea): targets fovea::ops, fovea::oracle and, where built, fovea::fovea.
