#include "config.h"

#include <nanobind/stl/string.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "fovea/error.h"

namespace fovea::python {

ModelConfig read_config(nb::handle config) {
  if (nb::hasattr(config, "to_dict")) {
    return read_config(config.attr("to_dict")());
  }
  if (PyDict_Check(config.ptr())) {
    const nb::object text = nb::module_::import_("json").attr("dumps")(config);
    return parse_model_config(nb::cast<std::string>(text), "config");
  }
  std::filesystem::path path =
      nb::cast<std::string>(nb::str(nb::module_::import_("os").attr("fspath")(config)));
  if (std::filesystem::is_directory(path)) path /= "config.json";
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw Error(ErrorCode::invalid_argument, path.string() + " cannot be read");
  return parse_model_config(text.str(), path.string());
}

}  // namespace fovea::python
