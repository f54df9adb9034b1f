// The router: scores, top-k with and without groups, weights, auxiliary losses, and the backward pass.
//
// One warp per token, PER_LANE experts per lane (expert i belongs to lane i % 32), all in registers: the
// logits are read once. Top-k is k warp-wide maxima of order-preserving integer keys. Exponentials are expf
// (at most 2 ulp); the reference rounds float64 once.
#ifndef PER_LANE
#define PER_LANE 4  // E <= 32 * PER_LANE
#define LOSSES 0    // whether route_tokens writes partial sums for the losses, or takes padding
#endif
#include "common.cuh"

#define ALL 0xffffffffu
#define EPSILON 1e-20f  // as in DeepSeek-V3, added to the sum of a token's weights
#define WARPS 8         // warps per thread block with LOSSES

template <class T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL, v, step);
  return v;
}

// Order-preserving integer keys of floats: 0 is below all numbers, 1 is NaN.
__device__ __forceinline__ u32 key_of(float x) {
  if (x != x) return 1u;
  const u32 u = __float_as_uint(x + 0.f);  // -0 becomes 0
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float number_of(u32 key) {
  if (key < 2u) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Removes the largest key of a warp, the lowest expert among equals, and returns its expert and key. RANGE:
// restricted to experts first to end - 1.
struct Largest {
  u32 key, expert;
};
template <bool RANGE>
__device__ __forceinline__ Largest take_largest(u32 (&keys)[PER_LANE], u32 first, u32 end) {
  const u32 lane = threadIdx.x % 32;
  u32 best = 0, slot = 0;
#pragma unroll
  for (u32 i = 0; i < PER_LANE; ++i) {
    const u32 expert = 32 * i + lane;
    if ((!RANGE || (expert >= first && expert < end)) && keys[i] > best) best = keys[i], slot = i;
  }
  const u32 top = __reduce_max_sync(ALL, best);
  const u32 expert = __reduce_min_sync(ALL, best == top ? 32 * slot + lane : ALL);
#pragma unroll
  for (u32 i = 0; i < PER_LANE; ++i)
    if (expert == 32 * i + lane) keys[i] = 0;
  return {top, expert};
}

// The same with each lane's few keys sorted once: half the instructions of scanning all keys per choice.
#define SORTED (PER_LANE <= 4)
__device__ __forceinline__ void sort_lane(u32 (&keys)[PER_LANE], u32 (&experts)[PER_LANE]) {
#pragma unroll
  for (int end = PER_LANE - 1; end > 0; --end)
#pragma unroll
    for (int i = 0; i < end; ++i) {
      const bool swap = keys[i] < keys[i + 1];  // stable: the lower expert first among equals
      const u32 key = keys[i], expert = experts[i];
      keys[i] = swap ? keys[i + 1] : key, experts[i] = swap ? experts[i + 1] : expert;
      keys[i + 1] = swap ? key : keys[i + 1], experts[i + 1] = swap ? expert : experts[i + 1];
    }
}
__device__ __forceinline__ u32 take_sorted(u32 (&keys)[PER_LANE], u32 (&experts)[PER_LANE]) {
  const u32 top = __reduce_max_sync(ALL, keys[0]);
  const u32 expert = __reduce_min_sync(ALL, keys[0] == top ? experts[0] : ALL);
  if (experts[0] == expert) {
#pragma unroll
    for (int i = 0; i + 1 < PER_LANE; ++i) keys[i] = keys[i + 1], experts[i] = experts[i + 1];
    keys[PER_LANE - 1] = 0;
  }
  return expert;
}

// Sum of the two best scores of each group: lane g receives group g's key.
__device__ __forceinline__ u32 key_of_groups(const u32 (&keys)[PER_LANE], int groups, int group_size) {
  u32 key_of_lane = 0;
  if (group_size == 32) {  // a group occupies one key index of all lanes (DeepSeek-V3)
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < PER_LANE; ++g) {
      const u32 top = __reduce_max_sync(ALL, keys[g]);
      const u32 first = __reduce_min_sync(ALL, keys[g] == top ? lane : ALL);
      const u32 second = __reduce_max_sync(ALL, lane == first ? 0u : keys[g]);
      if (lane == g) key_of_lane = key_of(number_of(top) + number_of(second));
    }
    return key_of_lane;
  }
  u32 copies[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) copies[i] = keys[i];
#pragma unroll 1
  for (int g = 0; g < groups; ++g) {
    const u32 first = g * group_size, end = first + group_size;
    float sum = number_of(take_largest<true>(copies, first, end).key);
    if (group_size > 1) sum += number_of(take_largest<true>(copies, first, end).key);
    if (threadIdx.x % 32 == g) key_of_lane = key_of(sum);
  }
  return key_of_lane;
}

__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.f ? e : 1.f) * reciprocal_approx(1.f + e);
}

// A token's logits and their softmax.
struct Token {
  float logits[PER_LANE], top, sum, inverse;
  __device__ __forceinline__ void read(const float* row, int experts) {
    const int lane = threadIdx.x % 32;
    top = __uint_as_float(0xff800000u);  // -infinity
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      logits[i] = 32 * i + lane < experts ? row[32 * i + lane] : __uint_as_float(0xff800000u);
      top = fmaxf(top, logits[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum += 32 * i + lane < experts ? expf(logits[i] - top) : 0.f;
    sum = warp_sum(sum);
    inverse = 1.f / sum;
  }
  // Sigmoid of a logit; if all logits are negative, divided by e^top. For quotients of scores, whose sum
  // would not be a normal number with logits below -87.
  __device__ __forceinline__ float lifted_sigmoid(float logit) const {
    return top < 0.f ? expf(logit - top) * reciprocal_approx(1.f + expf(logit)) : sigmoid(logit);
  }
  __device__ __forceinline__ float softmax(float logit) const { return expf(logit - top) * inverse; }
  __device__ __forceinline__ float score(float logit, bool by_sigmoid) const {
    return by_sigmoid ? sigmoid(logit) : softmax(logit);
  }
  __device__ __forceinline__ float log_sum_exp() const { return top + logf(sum); }
};

// ids, probs [tokens, topk] from logits [tokens, experts]. Grid y: sequences of `length` tokens. With
// partial_scores, each thread block (x) of a sequence also writes sums [experts] of normalised scores, counts
// [experts] of choices, and the sum of squared log-sum-exps. padding [tokens] or null: nonzero for tokens
// without an expert (ids -1, probs 0), which count in none of these.
// Traffic: the logits are read once, ids and probs are written once.
// Launch: one warp per token, or persistent thread blocks of WARPS warps.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    route_tokens(const float* logits, const float* bias, const u8* padding, i64 length, i64 experts, i64 topk,
                 i64 by_sigmoid, i64 groups, i64 topk_groups, i64 renormalize, float factor, int* ids,
                 float* probs, float* partial_scores, int* partial_counts, float* partial_z) {
  pdl_wait();
  pdl_launch_dependents();
  DYNAMIC_SHARED(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int group_size = (int)(experts / groups);
  const bool by_scores = bias || groups > 1;
  float shares[PER_LANE], squares = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) shares[i] = 0.f;
  // scores per warp | choices per expert of the thread block | squares per warp
  float* shared_shares = (float*)memory;
  int* shared_counts = (int*)memory + warps * (int)experts;
  float* shared_squares = (float*)memory + (warps + 1) * (int)experts;
  const bool losses = LOSSES && partial_scores;
  if (losses) {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) shared_counts[e] = 0;
    __syncthreads();
  }
  for (i64 t = (i64)blockIdx.x * warps + warp; t < length; t += (i64)gridDim.x * warps) {
    const i64 token = blockIdx.y * length + t;
    const float* row = logits + token * experts;
    Token x;
    x.read(row, (int)experts);
    u32 keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = 32 * i + lane;
      float choice = x.logits[i];
      if (by_scores) {
        choice = x.score(choice, by_sigmoid);
        if (bias && expert < experts) choice += bias[expert];
      }
      keys[i] = expert < experts ? key_of(choice) : 0u;
    }
    if (groups > 1) {
      u32 key_of_group = key_of_groups(keys, (int)groups, group_size);
      u32 allowed = 0;
      for (int r = 0; r < topk_groups; ++r) {
        const u32 top = __reduce_max_sync(ALL, key_of_group);
        const u32 group = __reduce_min_sync(ALL, key_of_group == top ? (u32)lane : ALL);
        if (lane == group) key_of_group = 0;
        allowed |= 1u << group;
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (32 * i + lane < experts && !(allowed >> (32 * i + lane) / group_size & 1u)) keys[i] = 0;
    }
    u32 own_expert = 0;  // lane r holds choice r
#if SORTED
    u32 experts_of[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) experts_of[i] = 32 * i + lane;
    sort_lane(keys, experts_of);
#endif
#pragma unroll 1
    for (int r = 0; r < topk; ++r) {
#if SORTED
      const u32 expert = take_sorted(keys, experts_of);
#else
      const u32 expert = take_largest<false>(keys, 0, 0).expert;
#endif
      if (lane == r) own_expert = expert;
    }
    const float score = lane < topk ? x.score(row[own_expert], by_sigmoid) : 0.f;
    float prob = score;
    if (renormalize) prob /= warp_sum(score) + EPSILON;
    // not in the variant without losses, where it would take 6 of 38 registers and a quarter of the warps
    const bool padded = LOSSES && padding && padding[token];
    if (lane < topk) {
      ids[token * topk + lane] = padded ? -1 : (int)own_expert;
      probs[token * topk + lane] = padded ? 0.f : prob * factor;
    }
    if (losses && !padded) {
      if (lane < topk) atomicAdd(shared_counts + own_expert, 1);  // integer sum: the order does not matter
      float total = 1.f;
      if (by_sigmoid) {  // computed twice: the scores of 32 experts per lane exceed the registers
        total = 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
          total += 32 * i + lane < experts ? x.lifted_sigmoid(x.logits[i]) : 0.f;
        total = warp_sum(total);
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (32 * i + lane < experts)
          shares[i] += (by_sigmoid ? x.lifted_sigmoid(x.logits[i]) : x.softmax(x.logits[i])) / total;
      const float z = x.log_sum_exp();
      squares += z * z;
    }
  }
  if (!losses) return;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i)
    if (32 * i + lane < experts) shared_shares[warp * (int)experts + 32 * i + lane] = shares[i];
  if (lane == 0) shared_squares[warp] = squares;
  __syncthreads();
  const i64 block = (i64)blockIdx.y * gridDim.x + blockIdx.x;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    float share = 0.f;  // summed in warp order
    for (int w = 0; w < warps; ++w) share += shared_shares[w * (int)experts + e];
    partial_scores[block * experts + e] = share;
    partial_counts[block * experts + e] = shared_counts[e];
  }
  if (threadIdx.x == 0) {
    float all = 0.f;
    for (int w = 0; w < warps; ++w) all += shared_squares[w];
    partial_z[block] = all;
  }
}

// For each sequence (y) and 32 experts (x): tokens_per_expert [sequences, experts], and partial_losses
// [sequences, gridDim.x], the sum over these experts of count times score sum.
// Launch: 8 warps per thread block, each reduces every eighth of the sequence's route_tokens blocks.
extern "C" __global__ void route_losses(const float* partial_scores, const int* partial_counts, i64 blocks,
                                        i64 experts, int* tokens_per_expert, double* partial_losses) {
  pdl_wait();
  pdl_launch_dependents();
  __shared__ double shared_shares[8][32];
  __shared__ int shared_counts[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 expert = 32 * blockIdx.x + lane, sequence = blockIdx.y;
  double share = 0.0;
  int count = 0;
  if (expert < experts)
    for (i64 b = warp; b < blocks; b += 8) {
      share += (double)partial_scores[(sequence * blocks + b) * experts + expert];
      count += partial_counts[(sequence * blocks + b) * experts + expert];
    }
  shared_shares[warp][lane] = share;
  shared_counts[warp][lane] = count;
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < 8; ++w) share += shared_shares[w][lane], count += shared_counts[w][lane];
  if (expert < experts) tokens_per_expert[sequence * experts + expert] = count;
  const double loss = warp_sum(share * count);
  if (lane == 0) partial_losses[sequence * gridDim.x + blockIdx.x] = loss;
}

// factors [sequences + 1] of sequences with padding: of each one's sum of counts times score sums, and of the
// sum of squared log-sum-exps. A token was counted topk times; a sequence without tokens has factor 0 and is
// not in the mean.
// Traffic: tokens_per_expert [sequences, experts] once.
// Launch: one thread block of 256.
extern "C" __global__ void route_factors(const int* tokens_per_expert, i64 sequences, i64 experts, i64 topk,
                                         float* factors) {
  pdl_wait();
  pdl_launch_dependents();
  __shared__ double shared[256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double tokens = 0.0, present = 0.0;  // exact: integers below 2^53
  for (i64 s = warp; s < sequences; s += 8) {
    double count = 0.0;
    for (i64 e = lane; e < experts; e += 32) count += tokens_per_expert[s * experts + e];
    count = warp_sum(count) / topk;
    if (lane == 0) {
      factors[s] = __uint_as_float((u32)count);  // until the number of sequences is known
      tokens += count, present += count > 0.0;
    }
  }
  tokens = block_reduce(tokens, shared, [](double a, double b) { return a + b; });
  present = block_reduce(present, shared, [](double a, double b) { return a + b; });
  for (i64 s = threadIdx.x; s < sequences; s += 256) {
    const double count = __float_as_uint(factors[s]);
    factors[s] = count > 0.0 ? (float)(experts / (topk * count * count * present)) : 0.f;
  }
  if (threadIdx.x == 0) factors[sequences] = tokens > 0.0 ? (float)(1.0 / tokens) : 0.f;
}

// Total losses, summed in a fixed order by one thread block of 256. partial_losses [sequences, columns].
// factors: from route_factors, in place of the coefficients; null without padding.
extern "C" __global__ void route_total(const double* partial_losses, i64 sequences, i64 columns,
                                       const float* partial_z, i64 blocks, float aux_coefficient,
                                       float z_coefficient, const float* factors, float* aux_loss,
                                       float* z_loss) {
  pdl_wait();
  __shared__ double shared[256];
  double aux = 0.0, z = 0.0;
  if (factors) aux_coefficient = 1.f, z_coefficient = factors[sequences];
  for (i64 i = threadIdx.x; i < sequences * columns; i += 256)
    aux += factors ? partial_losses[i] * factors[i / columns] : partial_losses[i];
  for (i64 i = threadIdx.x; i < blocks; i += 256) z += (double)partial_z[i];
  aux = block_reduce(aux, shared, [](double a, double b) { return a + b; });
  z = block_reduce(z, shared, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) *aux_loss = (float)(aux * aux_coefficient), *z_loss = (float)(z * z_coefficient);
}

// grad_logits [tokens, experts] float32 or, with `split`, [tokens, 3 * experts] bfloat16: each gradient as
// three bfloat16 terms, each the rounded remainder of the previous ones. aux_coefficient, z_coefficient:
// factors of the losses' sums; with padding in place of them factors [sequences + 1] from route_factors.
// padding [tokens] or null: nonzero for tokens whose logits are not read, and whose gradient is zeros.
// Traffic: the logits are read once, the gradient is written once.
// Launch: one warp per token.
extern "C" __global__ void __launch_bounds__(128)
    route_backward_tokens(const float* grad_probs, const float* logits, const int* ids, const u8* padding,
                          i64 tokens, i64 length, i64 experts, i64 topk, i64 by_sigmoid, i64 renormalize,
                          float factor, const int* tokens_per_expert, const float* grad_aux,
                          float aux_coefficient, const float* grad_z, float z_coefficient,
                          const float* factors, i64 sequences, i64 split, void* out) {
  pdl_wait();
  pdl_launch_dependents();
  const int lane = threadIdx.x % 32;
  const i64 token = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (token >= tokens) return;
  if (padding && padding[token]) {
    if (split)
      for (i64 i = lane; i < 3 * experts; i += 32) ((u16*)out)[token * 3 * experts + i] = 0;
    else
      for (i64 i = lane; i < experts; i += 32) ((float*)out)[token * experts + i] = 0.f;
    return;
  }
  const float* row = logits + token * experts;
  Token x;
  x.read(row, (int)experts);
  // gradients of the chosen scores; lane r holds choice r
  const int expert = lane < topk ? ids[token * topk + lane] : -1;
  const bool valid = expert >= 0 && expert < experts;
  const float chosen = valid ? x.score(row[expert], by_sigmoid) : 0.f;
  float of_chosen = valid ? grad_probs[token * topk + lane] * factor : 0.f;
  if (renormalize) {
    const float total = warp_sum(chosen) + EPSILON;
    of_chosen = (of_chosen - warp_sum(of_chosen * (chosen / total))) / total;
    if (!valid) of_chosen = 0.f;
  }
  float scores[PER_LANE], of_scores[PER_LANE];  // by_sigmoid: of_scores times scores
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    scores[i] = 32 * i + lane < experts ? x.score(x.logits[i], by_sigmoid) : 0.f;
    of_scores[i] = 0.f;
  }
  if (grad_aux) {
    const float by = *grad_aux * (factors ? factors[token / length] : aux_coefficient);
    const int* counts = tokens_per_expert + token / length * experts;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (32 * i + lane < experts) of_scores[i] = by * (float)counts[32 * i + lane];
    if (by_sigmoid) {  // the auxiliary loss uses scores divided by their sum
      float total = 0.f, mean = 0.f;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const float score = 32 * i + lane < experts ? x.lifted_sigmoid(x.logits[i]) : 0.f;
        total += score, mean += of_scores[i] * score;
      }
      total = warp_sum(total), mean = warp_sum(mean) / total;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (32 * i + lane < experts)
          of_scores[i] = (of_scores[i] - mean) * (x.lifted_sigmoid(x.logits[i]) / total);
    }
  }
  for (int r = 0; r < topk; ++r) {
    const int at = __shfl_sync(ALL, expert, r);
    const float grad = __shfl_sync(ALL, of_chosen, r);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (at == 32 * i + lane) of_scores[i] += by_sigmoid ? grad * scores[i] : grad;
  }
  float mean = 0.f;
  if (!by_sigmoid) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) mean += of_scores[i] * scores[i];
    mean = warp_sum(mean);
  }
  const float by_z =
      grad_z ? 2.f * *grad_z * (factors ? factors[sequences] : z_coefficient) * x.log_sum_exp() : 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (32 * i + lane >= experts) continue;
    float grad = by_sigmoid ? of_scores[i] * (1.f - scores[i]) : scores[i] * (of_scores[i] - mean);
    if (grad_z) grad += by_z * x.softmax(x.logits[i]);
    if (!split) {
      ((float*)out)[token * experts + 32 * i + lane] = grad;
      continue;
    }
    u16* to = (u16*)out + token * 3 * experts + 32 * i + lane;
#pragma unroll
    for (int part = 0; part < 3; ++part, to += experts) {
      const u16 rounded = float_to_bf16(grad);
      *to = rounded;
      grad -= bf16_to_float(rounded);
    }
  }
}
