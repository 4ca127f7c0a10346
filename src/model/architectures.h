// What the formulas of each model type add to a ModelConfig. Their fields are read, or refused by
// name when they would change attention and nothing here implements them.
#pragma once

#include <string>
#include <vector>

#include "fovea/model.h"
#include "model/config_fields.h"

namespace fovea {

/// Model types with latent attention, in the order of messages.
const std::vector<std::string>& mla_model_types();
/// Fills in what belongs to attention; config.model_type is one of mla_model_types().
void parse_mla(const ConfigFields& fields, ModelConfig& config);

/// Model types with grouped-query attention.
const std::vector<std::string>& gqa_model_types();
void parse_gqa(const ConfigFields& fields, ModelConfig& config);

/// layer_types, one of full_attention and sliding_attention for each layer; empty when absent.
std::vector<std::string> parse_layer_types(const ConfigFields& fields, std::int64_t num_layers);

}  // namespace fovea
