// What every launch needs.
#pragma once

#include "core/cuda_device.h"
#include "fovea/op_context.h"
