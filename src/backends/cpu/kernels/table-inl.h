// The instruction set's table, after all kernels.

namespace fovea::cpu::FOVEA_CPU_ISA {

const Kernels kKernels = {
    kLanes,
    {load_row<float>, load_row<Float16>, load_row<BFloat16>},
    {load_codes<Float8E4M3FN>, load_codes<Float8E5M2>, load_codes<std::int8_t>, load_nibbles},
    {store_row<float>, store_row<Float16>, store_row<BFloat16>},
    {sum_squares<float>, sum_squares<Float16>, sum_squares<BFloat16>},
    {scale_by_weight<float>, scale_by_weight<Float16>, scale_by_weight<BFloat16>},
    {rotate<float>, rotate<Float16>, rotate<BFloat16>},
    add_weighted,
    attend,
    {score_in_place<float>, score_in_place<Float16>, score_in_place<BFloat16>,
     score_in_place<Float8E4M3FN>, score_in_place<Float8E5M2>, score_in_place<std::int8_t>,
     score_in_place<Nibbles>},
    score_int8_in_place,
    kQueryDigits,
    weigh,
    {add_in_place<float>, add_in_place<Float16>, add_in_place<BFloat16>,
     add_in_place<Float8E4M3FN>, add_in_place<Float8E5M2>, add_in_place<std::int8_t>,
     add_in_place<Nibbles>},
    add_int8_in_place,
    multiply_add_rounds,
    sum,
    FOVEA_CPU_PAIRS,
};

}  // namespace fovea::cpu::FOVEA_CPU_ISA
