// Arithmetic on vectors, which the compiler maps to the registers of the level that it compiles for.
//
// Everything here and in the kernels has internal linkage, and nothing comes from the standard library but
// types: a function with vague linkage might be compiled with one level's instructions and called from
// another's code.
#pragma once

#include <cstdint>
#include <cstring>

namespace aft {
namespace AFT_LEVEL {
namespace {

// A vector of as many numbers as a register of AFT_VECTOR_BYTES holds of `Real`, also of other types.
template <class Real>
struct Vectors;

template <>
struct Vectors<float> {
  static constexpr int lanes = AFT_VECTOR_BYTES / 4;
  using Bit = std::int32_t;
  static constexpr Bit all_but_sign = 0x7fffffff;
  typedef float Number __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef float Single __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef double Double __attribute__((vector_size(AFT_VECTOR_BYTES * 2)));
  typedef std::int32_t Bits __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef std::uint32_t Unsigned __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef std::uint32_t SingleBits __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef std::uint16_t Half __attribute__((vector_size(AFT_VECTOR_BYTES / 2)));
};

template <>
struct Vectors<double> {
  static constexpr int lanes = AFT_VECTOR_BYTES / 8;
  using Bit = std::int64_t;
  static constexpr Bit all_but_sign = 0x7fffffffffffffff;
  typedef double Number __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef float Single __attribute__((vector_size(AFT_VECTOR_BYTES / 2)));
  typedef double Double __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef std::int64_t Bits __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef std::uint64_t Unsigned __attribute__((vector_size(AFT_VECTOR_BYTES)));
  typedef std::uint32_t SingleBits __attribute__((vector_size(AFT_VECTOR_BYTES / 2)));
  typedef std::uint16_t Half __attribute__((vector_size(AFT_VECTOR_BYTES / 4)));
};

template <class Real>
using Vector = typename Vectors<Real>::Number;

struct Bfloat16 {
  std::uint16_t bits;
};

constexpr float kLowest = -3.40282347e38f;

// The channels from `first` on that make up a whole vector, or the last of a row.
struct Whole {
  std::int64_t first;
  template <class T>
  static constexpr std::size_t bytes(int lanes) {
    return lanes * sizeof(T);
  }
};
struct Rest {
  std::int64_t first;
  int count;
  template <class T>
  std::size_t bytes(int) const {
    return count * sizeof(T);
  }
};

// Calls f for every vector of a row of n channels.
template <class Real, class Function>
[[gnu::always_inline]] inline void for_each_vector(std::int64_t n, Function f) {
  constexpr int lanes = Vectors<Real>::lanes;
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) f(Whole{c});
  if (c < n) f(Rest{c, int(n - c)});
}

template <class To, class From>
[[gnu::always_inline]] inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

template <class Real, class At>
[[gnu::always_inline]] inline Vector<Real> load(const float* row, At at) {
  typename Vectors<Real>::Single x{};
  std::memcpy(&x, row + at.first, at.template bytes<float>(Vectors<Real>::lanes));
  return __builtin_convertvector(x, Vector<Real>);
}

template <class Real, class At>
[[gnu::always_inline]] inline Vector<Real> load(const Bfloat16* row, At at) {
  typename Vectors<Real>::Half half{};
  std::memcpy(&half, row + at.first, at.template bytes<Bfloat16>(Vectors<Real>::lanes));
  const auto bits = __builtin_convertvector(half, typename Vectors<Real>::SingleBits) << 16;
  return __builtin_convertvector(bits_of<typename Vectors<Real>::Single>(bits), Vector<Real>);
}

template <class Real, class At>
[[gnu::always_inline]] inline void store(Vector<Real> x, float* row, At at) {
  const auto single = __builtin_convertvector(x, typename Vectors<Real>::Single);
  std::memcpy(row + at.first, &single, at.template bytes<float>(Vectors<Real>::lanes));
}

// To the nearest, ties to even; a NaN stays one.
template <class Real, class At>
[[gnu::always_inline]] inline void store(Vector<Real> x, Bfloat16* row, At at) {
  using Bits = typename Vectors<Real>::SingleBits;
  const auto single = __builtin_convertvector(x, typename Vectors<Real>::Single);
  const Bits bits = bits_of<Bits>(single);
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits quiet = Bits{} + 0x7fc0u;
  const auto half = __builtin_convertvector(single == single ? rounded : quiet, typename Vectors<Real>::Half);
  std::memcpy(row + at.first, &half, at.template bytes<Bfloat16>(Vectors<Real>::lanes));
}

// A task's own numbers: rows of whole vectors.
template <class Real, class At>
[[gnu::always_inline]] inline Vector<Real> get(const Real* row, At at) {
  Vector<Real> x;
  std::memcpy(&x, row + at.first, sizeof x);
  return x;
}

template <class Real, class At>
[[gnu::always_inline]] inline void put(Vector<Real> x, Real* row, At at) {
  std::memcpy(row + at.first, &x, sizeof x);
}

template <class V>
[[gnu::always_inline]] inline V maximum(V x, V y) {
  return x > y ? x : y;
}

template <class Real>
[[gnu::always_inline]] inline Vector<Real> magnitude(Vector<Real> x) {
  using Bits = typename Vectors<Real>::Bits;
  return bits_of<Vector<Real>>(bits_of<Bits>(x) & Vectors<Real>::all_but_sign);
}

template <class Real>
[[gnu::always_inline]] inline Vector<Real> all(Real x) {
  return Vector<Real>{} + x;
}

template <class Real>
inline bool any(typename Vectors<Real>::Bits mask) {
  std::uint64_t words[AFT_VECTOR_BYTES / 8], found = 0;
  std::memcpy(words, &mask, sizeof words);
  for (std::uint64_t word : words) found |= word;
  return found != 0;
}

// The exponential is 2^n times that of a rest of at most log(2) / 2, where the sum with `shift` rounds to n. It
// is exactly 1 at 0; in float the polynomial's relative error is 1.1e-7 at most, and roundings come to that.
template <class Real>
struct Exponential;

template <>
struct Exponential<float> {
  static constexpr float least = -86.0f, most = 88.0f;
  static constexpr float log2_e = 1.44269504f, rest_of_log2_e = 1.925963033e-8f;
  static constexpr float shift = 12582912.0f;
  static constexpr int mantissa = 23, one = 127;

  template <class V>
  [[gnu::always_inline]] static V of_rest(V x, V n) {
    const V r = x * rest_of_log2_e + (x * log2_e - n);
    V p = r * 1.326472382e-3f + 9.671512991e-3f;
    p = p * r + 5.550733581e-2f;
    p = p * r + 2.402224243e-1f;
    p = p * r + 6.931470037e-1f;
    return p * r + 1.0f;
  }
};

template <>
struct Exponential<double> {
  static constexpr double least = -707.0, most = 709.0;
  static constexpr double log2_e = 1.4426950408889634;
  static constexpr double log_2 = 0.693147180369123816490, rest_of_log_2 = 1.90821492927058770002e-10;
  static constexpr double shift = 6755399441055744.0;
  static constexpr int mantissa = 52, one = 1023;

  template <class V>
  [[gnu::always_inline]] static V of_rest(V x, V n) {
    const V r = (x - n * log_2) - n * rest_of_log_2;
    V p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    return (p * r) * r + r + 1.0;
  }
};

// Where x is known to lie between `least` and `most`: elsewhere, and of NaN, the result may be anything.
template <class Real>
[[gnu::always_inline]] inline Vector<Real> exponential_inside(Vector<Real> x) {
  using E = Exponential<Real>;
  using Bits = typename Vectors<Real>::Unsigned;
  const Vector<Real> shifted = x * E::log2_e + E::shift;
  const Vector<Real> y = E::of_rest(x, shifted - E::shift);
  return bits_of<Vector<Real>>(bits_of<Bits>(y) + (bits_of<Bits>(shifted) << E::mantissa));
}

// The same number for the same x, 0 below `least`, and NaN of NaN; x is at most `most`.
template <class Real>
[[gnu::always_inline]] inline Vector<Real> exponential(Vector<Real> x) {
  const Vector<Real> inside = x < Exponential<Real>::least ? all<Real>(Exponential<Real>::least) : x;
  const Vector<Real> y = exponential_inside<Real>(inside);
  return x < Exponential<Real>::least ? Vector<Real>{} : x == x ? y : x;
}

// e^-x, as far as a sigmoid can tell.
template <class Real>
[[gnu::always_inline]] inline Vector<Real> exponential_of_minus(Vector<Real> x) {
  const Vector<Real> most = all<Real>(Exponential<Real>::most);
  return exponential<Real>(-x > most ? most : -x);
}

// Whether all of many numbers lie between a number below 0 and one above; a NaN does not. Among the bits of
// numbers as signed integers those of the largest are the largest, as unsigned integers those of the lowest.
struct Extremes {
  using Signed = Vectors<float>::Bits;
  using Unsigned = Vectors<float>::SingleBits;
  Signed highest{};
  Unsigned lowest{};

  [[gnu::always_inline]] void include(Vector<float> x) {
    const Signed positive = bits_of<Signed>(x);
    const Unsigned negative = bits_of<Unsigned>(x);
    highest = positive > highest ? positive : highest;
    lowest = negative > lowest ? negative : lowest;
  }

  [[gnu::always_inline]] void include(const Extremes& others) {
    highest = others.highest > highest ? others.highest : highest;
    lowest = others.lowest > lowest ? others.lowest : lowest;
  }

  bool lie_between(float low, float high) const {
    const Unsigned least = Unsigned{} + bits_of<std::uint32_t>(low);
    const Signed most = Signed{} + bits_of<std::int32_t>(high);
    return !any<float>(bits_of<Signed>(lowest > least) | (highest > most));
  }
};

template <class T>
[[gnu::always_inline]] inline void fill(T* x, std::int64_t n, T value) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = value;
}

}  // namespace
}  // namespace AFT_LEVEL
}  // namespace aft
