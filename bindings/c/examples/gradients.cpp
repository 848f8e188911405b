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
  explicit Memory(const char *device) : device_(device) {}

  Buffer bytes(std::uint64_t count) const {
    FmhaBuffer *made = nullptr;
    check(fmha_buffer(device_, count, &made));
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
  const char *device_;
};

std::vector<float> values_of(const Buffer &buffer, std::size_t count) {
  std::vector<std::uint16_t> rounded(count);
  check(fmha_download(buffer.get(), rounded.data(), count * sizeof rounded[0]));
  std::vector<float> values(count);
  std::transform(rounded.begin(), rounded.end(), values.begin(), from_bf16);
  return values;
}

void *address(const Buffer &buffer) { return fmha_buffer_data(buffer.get()); }

// Plans a problem, and runs it with scratch for one run at a time. The plan could serve more streams at once.
void run(const char *device, const FmhaProblem &problem, FmhaArgs args, const Memory &memory) {
  FmhaOptions options{};
  options.struct_bytes = sizeof options;
  options.caller_workspace = 1;
  FmhaPlan *made = nullptr;
  check(fmha_plan(device, &problem, &options, &made));
  const Plan plan(made);
  args.workspace_bytes = fmha_plan_workspace_bytes(made);
  const Buffer workspace = args.workspace_bytes > 0 ? memory.bytes(args.workspace_bytes) : nullptr;
  args.workspace = address(workspace);
  check(fmha_run(made, &args));
  std::printf("%s\n", fmha_plan_text(made));
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

int compare(const char *device) {
  const Memory memory(device);

  std::mt19937 generator(7);
  std::vector<std::vector<float>> in(4, std::vector<float>(kElems));  // Q, K, V, dO
  for (auto &values : in) {
    for (float &value : values) value = from_bf16(to_bf16(static_cast<float>(generator()) / 2147483648.0f - 1));
  }
  const Buffer q = memory.holding(in[0]), k = memory.holding(in[1]), v = memory.holding(in[2]);
  const Buffer dout = memory.holding(in[3]), o = memory.bytes(2 * kElems), lse = memory.bytes(4 * kLseElems);
  const Buffer grads[3] = {memory.bytes(2 * kElems), memory.bytes(2 * kElems), memory.bytes(2 * kElems)};

  const FmhaStrides dense = {kRows * kHeads * kDim, kHeads * kDim, kDim, 1};  // [1, kRows, kHeads, kDim]
  FmhaProblem problem{};
  problem.struct_bytes = sizeof problem;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = kRows;
  problem.num_heads_q = problem.num_heads_kv = kHeads;
  problem.head_dim_qk = problem.head_dim_v = kDim;
  problem.q = problem.k = problem.v = problem.o = dense;
  problem.write_lse = 1;  // backward reads it
  problem.mask = "b";
  problem.dtype_qk = problem.dtype_v = problem.dtype_o = FMHA_BF16;
  FmhaArgs args{};
  args.struct_bytes = sizeof args;
  args.q = address(q);
  args.k = address(k);
  args.v = address(v);
  args.o = address(o);
  args.lse = static_cast<float *>(address(lse));
  run(device, problem, args, memory);

  FmhaGradients gradients{};
  gradients.struct_bytes = sizeof gradients;
  gradients.dout = gradients.dq = gradients.dk = gradients.dv = dense;
  gradients.dtype_grad = FMHA_BF16;
  problem.gradients = &gradients;
  args.dout = address(dout);
  args.dq = address(grads[0]);
  args.dk = address(grads[1]);
  args.dv = address(grads[2]);
  run(device, problem, args, memory);

  const auto right = right_gradients(in);
  const char *const names[3] = {"dQ", "dK", "dV"};
  bool all_right = true;
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
    return compare(count > 1 ? words[1] : "auto");
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
