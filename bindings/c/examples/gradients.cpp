// Forward and backward from C++: handles that free themselves, errors as exceptions, and scratch of the caller's own,
// so that one plan serves several streams.
//
//   c++ -std=c++17 gradients.cpp -o gradients $(pkg-config --cflags --libs fmha)
//   ./gradients             the best device there is; or `cpu`, `cuda`, `cuda:1`, `rocm`

#include <fmha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kRows = 48, kHeads = 2, kDim = 64;
constexpr std::size_t kElems = std::size_t{kRows} * kHeads * kDim, kLseElems = std::size_t{kHeads} * kRows;

void check(int status) {
  if (status != 0) throw std::runtime_error(fmha_last_error());
}

struct Drop {
  void operator()(FmhaPlan *plan) const { fmha_drop(plan); }
  void operator()(FmhaBuffer *buffer) const { fmha_drop_buffer(buffer); }
};
using Plan = std::unique_ptr<FmhaPlan, Drop>;
using Buffer = std::unique_ptr<FmhaBuffer, Drop>;

std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bf16(std::uint16_t x) {
  std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

class Memory {
 public:
  explicit Memory(const FmhaOptions &options) : options_(options) {}

  Buffer bytes(std::uint64_t count) const {
    FmhaBuffer *made = nullptr;
    check(fmha_buffer(&options_, count, &made));
    return Buffer(made);
  }

  Buffer holding(const std::vector<float> &values) const {
    std::vector<std::uint16_t> rounded(values.size());
    std::transform(values.begin(), values.end(), rounded.begin(), to_bf16);
    Buffer buffer = bytes(rounded.size() * sizeof rounded[0]);
    check(fmha_upload(buffer.get(), rounded.data(), rounded.size() * sizeof rounded[0]));
    return buffer;
  }

 private:
  const FmhaOptions &options_;
};

std::vector<float> values_of(const Buffer &buffer, std::size_t count) {
  std::vector<std::uint16_t> rounded(count);
  check(fmha_download(buffer.get(), rounded.data(), count * sizeof rounded[0]));
  std::vector<float> values(count);
  std::transform(rounded.begin(), rounded.end(), values.begin(), from_bf16);
  return values;
}

// [1, kRows, kHeads, kDim].
FmhaTensor tensor(const Buffer &buffer) {
  return {fmha_buffer_data(buffer.get()), kRows * kHeads * kDim, kHeads * kDim, kDim, 1};
}

// A plan whose runs bring their scratch, and scratch for one of them at a time.
struct Planned {
  Plan plan;
  Buffer workspace;
};

Planned planned(FmhaCall &call, const FmhaOptions &options, const Memory &memory) {
  FmhaPlan *made = nullptr;
  check(fmha_plan(&call, &options, &made));
  Planned planned{Plan(made), nullptr};
  call.workspace_bytes = fmha_plan_workspace_bytes(made);
  if (call.workspace_bytes > 0) planned.workspace = memory.bytes(call.workspace_bytes);
  call.workspace = fmha_buffer_data(planned.workspace.get());
  return planned;
}

// dQ, dK and dV in double, of a causal call.
std::vector<std::vector<double>> right_gradients(const std::vector<std::vector<float>> &in) {
  const auto &q = in[0], &k = in[1], &v = in[2], &dout = in[3];
  std::vector<std::vector<double>> grads(3, std::vector<double>(kElems));
  const double scale = 1 / std::sqrt(double{kDim});
  auto at = [](int row, int head, int dim) { return (row * kHeads + head) * kDim + dim; };
  auto dot = [&](const std::vector<float> &a, int i, const std::vector<float> &b, int j, int head) {
    double sum = 0;
    for (int d = 0; d < kDim; ++d) sum += double{a[at(i, head, d)]} * b[at(j, head, d)];
    return sum;
  };
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kRows; ++i) {
      std::vector<double> p(i + 1), dp(i + 1);
      double sum = 0, delta = 0;
      for (int j = 0; j <= i; ++j) sum += p[j] = std::exp(scale * dot(q, i, k, j, head));
      for (int j = 0; j <= i; ++j) delta += (p[j] /= sum) * (dp[j] = dot(dout, i, v, j, head));
      for (int j = 0; j <= i; ++j) {
        const double ds = p[j] * (dp[j] - delta) * scale;
        for (int d = 0; d < kDim; ++d) {
          grads[0][at(i, head, d)] += ds * k[at(j, head, d)];
          grads[1][at(j, head, d)] += ds * q[at(i, head, d)];
          grads[2][at(j, head, d)] += p[j] * dout[at(i, head, d)];
        }
      }
    }
  }
  return grads;
}

int run(const char *backend) {
  FmhaOptions options{};
  options.struct_bytes = sizeof options;
  options.backend = backend;
  options.caller_workspace = 1;
  const Memory memory(options);

  std::mt19937 generator(7);
  std::vector<std::vector<float>> in(4, std::vector<float>(kElems));  // Q, K, V, dO
  for (auto &values : in) {
    for (float &value : values) value = from_bf16(to_bf16(static_cast<float>(generator()) / 2147483648.0f - 1));
  }
  const Buffer q = memory.holding(in[0]), k = memory.holding(in[1]), v = memory.holding(in[2]);
  const Buffer dout = memory.holding(in[3]), o = memory.bytes(2 * kElems), lse = memory.bytes(4 * kLseElems);
  const Buffer grads[3] = {memory.bytes(2 * kElems), memory.bytes(2 * kElems), memory.bytes(2 * kElems)};

  FmhaCall call{};
  call.struct_bytes = sizeof call;
  call.batch = 1;
  call.seqlen_q = call.seqlen_k = kRows;
  call.num_heads_q = call.num_heads_kv = kHeads;
  call.head_dim_qk = call.head_dim_v = kDim;
  call.q = tensor(q);
  call.k = tensor(k);
  call.v = tensor(v);
  call.o = tensor(o);
  call.lse = static_cast<float *>(fmha_buffer_data(lse.get()));  // backward reads it
  call.mask = "b";
  call.dtype_qk = call.dtype_v = call.dtype_o = FMHA_BF16;

  const Planned forward = planned(call, options, memory);
  check(fmha_run(forward.plan.get(), &call));

  FmhaGradients gradients{};
  gradients.struct_bytes = sizeof gradients;
  gradients.dout = tensor(dout);
  gradients.dq = tensor(grads[0]);
  gradients.dk = tensor(grads[1]);
  gradients.dv = tensor(grads[2]);
  gradients.dtype_grad = FMHA_BF16;
  FmhaCall back = call;
  back.gradients = &gradients;
  back.workspace = nullptr;
  back.workspace_bytes = 0;
  const Planned backward = planned(back, options, memory);
  check(fmha_run(backward.plan.get(), &back));

  const auto right = right_gradients(in);
  const char *const names[3] = {"dQ", "dK", "dV"};
  bool all_right = true;
  std::printf("%s\n", fmha_plan_text(backward.plan.get()));
  for (int i = 0; i < 3; ++i) {
    const auto found = values_of(grads[i], kElems);
    double worst = 0, largest = 0;
    for (std::size_t at = 0; at < kElems; ++at) {
      // Written so that a NaN counts.
      const double away = std::abs(found[at] - right[i][at]);
      if (!(away <= worst)) worst = away;
      largest = std::max(largest, std::abs(right[i][at]));
    }
    const bool close = worst < 0.02 * largest;  // bf16: P and dS are rounded to 8 bits before their products
    std::printf("%s: largest error %.4f of %.2f: %s\n", names[i], worst, largest, close ? "PASS" : "FAIL");
    all_right = all_right && close;
  }
  return all_right ? 0 : 1;
}

}  // namespace

int main(int count, char **words) {
  try {
    return run(count > 1 ? words[1] : "auto");
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
