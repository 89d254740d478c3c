// What the kernels of AFT-local and AFT-conv share.
//
// They compute in float where that is exact enough, else in double, else, where exponents spread beyond the
// range of both, element by element (see exact.hpp). A result that a pass cannot vouch for is written as NaN,
// for the next to replace. What a row can see decides that, and nothing else: no later key, no other channel.
#pragma once

#include <utility>

#include "memory.hpp"
#include "tracks.hpp"
#include "vectors.hpp"
#include "window.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

// Rows whose sums are held in registers: two vectors each.
constexpr int kTile = AFT_VECTOR_BYTES == 64 ? 8 : 4;
// Rows that share an origin of their exponents.
constexpr std::int64_t kChunk = 64;
// Up to this many products double costs nothing beside the call itself.
constexpr std::int64_t kSmall = 1 << 16;

template <class Real>
struct Range;

template <>
struct Range<float> {
  static constexpr float above = 40.0f;          // of a key over the origin, which later ones may exceed
  static constexpr float bias = 30.0f;           // of a bias, either way; -inf is no bias
  static constexpr float least = 1e-12f;         // of a denominator: beside it what underflows is nothing
  static constexpr float most = 1e30f;           // of a numerator, a denominator, and sums of squares
  static constexpr float value = 1e20f;
  static constexpr float vanishing = 1e-18f;     // of a numerator to its denominator
  static constexpr float tiny = 1e-15f;          // of a value: its products may underflow
  static constexpr float saturated = 15.0f;      // keys so far from the origin: gradients are small differences
  static constexpr float saturated_bias = 10.0f;
};

template <>
struct Range<double> {
  static constexpr double above = 300.0, bias = 300.0, least = 1e-100, most = 1e300, value = 1e300;
  static constexpr double vanishing = 0.0, tiny = 0.0, saturated = 300.0, saturated_bias = 300.0;
};

// How far the largest key may rise above the origin before that follows.
constexpr float kLead = 8.0f;

constexpr double kNothing = -__builtin_inf();

template <class Real>
constexpr int kLanes = Vectors<Real>::lanes;

// e^bias of the cells of row t's window, 0 beyond the ends of the sequence; room for another vector is behind
// them.
template <class Real>
inline RowOfBias weigh_row(const Window& problem, std::int64_t batch, std::int64_t t, Real* row) {
  constexpr int lanes = kLanes<Real>;
  const std::int64_t cells = problem.cells(), first = t + problem.offset - problem.behind;
  const std::int64_t start = batch * problem.bias_batch_stride + t * problem.bias_query_stride;
  const std::int64_t stride = problem.bias_key_stride;
  const std::int64_t begin = first < 0 ? -first : 0;
  const std::int64_t end = first + cells > problem.keys ? problem.keys - first : cells;
  for (std::int64_t j = 0; j < cells + lanes; ++j) row[j] = Real(kNothing);
  if (problem.has_wide_bias) {
    const double* const bias = static_cast<const double*>(problem.bias) + start;
    for (std::int64_t j = begin; j < end; ++j) row[j] = Real(bias[(first + j) * stride]);
  } else {
    const float* const bias = static_cast<const float*>(problem.bias) + start;
    for (std::int64_t j = begin; j < end; ++j) row[j] = Real(bias[(first + j) * stride]);
  }
  typename Vectors<Real>::Bits large{}, wide{};
  for (std::int64_t j = 0; j < cells; j += lanes) {
    const Vector<Real> bias = get<Real>(row + j, Whole{0}), size = magnitude<Real>(bias);
    const auto absent = bias == Real(kNothing);
    large |= ~(absent | (size <= Range<Real>::bias));
    wide |= ~(absent | (size <= Range<Real>::saturated_bias));
    put<Real>(exponential<Real>(absent | (size <= Range<Real>::bias) ? bias : Vector<Real>{}), row + j, Whole{0});
  }
  return any<Real>(large) ? kLarge : any<Real>(wide) ? kSaturated : kTame;
}

// Some lanes of a vector of channels: `count` of them, from channel `first` of the task on.
struct Part {
  std::int64_t first;
  int count;
};

template <class Real, class Element>
[[gnu::always_inline]] inline Vector<Real> read(const Element* row, Part part) {
  if (part.count == kLanes<Real>) return load<Real>(row, Whole{part.first});
  return load<Real>(row, Rest{part.first, part.count});
}

template <class Real, class Element>
[[gnu::always_inline]] inline void write(Vector<Real> x, Element* row, Part part) {
  if (part.count == kLanes<Real>) {
    store<Real>(x, row, Whole{part.first});
  } else {
    store<Real>(x, row, Rest{part.first, part.count});
  }
}

template <class Real>
[[gnu::always_inline]] inline Vector<Real> at(const Real* row) {
  return get<Real>(row, Whole{0});
}

template <class Real>
[[gnu::always_inline]] inline void set(Real* row, Vector<Real> x) {
  put<Real>(x, row, Whole{0});
}

template <class Element>
struct Task {
  const Window& problem;
  Channels channels;

  template <class T = Element>
  Track<T> track(const Rows& rows) const {
    return track_of<T>(rows, channels);
  }

  bool sees(std::int64_t position) const {
    return position >= 0 && position < problem.keys && is_visible(problem.hidden, channels, position);
  }

  // Where these channels begin in a State.
  std::int64_t in_state() const { return channels.batch * problem.channels + channels.first; }

  double bias(std::int64_t t, std::int64_t s) const {
    const std::int64_t at =
        channels.batch * problem.bias_batch_stride + t * problem.bias_query_stride + s * problem.bias_key_stride;
    if (problem.has_wide_bias) return static_cast<const double*>(problem.bias)[at];
    return static_cast<const float*>(problem.bias)[at];
  }

  template <class Real>
  [[gnu::always_inline]] void put_grad_k(std::int64_t s, Part part, Vector<Real> x) const {
    if (!problem.has_wide_grad_k) return write<Real>(x, track<float>(problem.grad_k)[s], part);
    const auto wide = __builtin_convertvector(x, typename Vectors<Real>::Double);
    std::memcpy(track<double>(problem.grad_k)[s] + part.first, &wide, part.count * sizeof(double));
  }

  // Vectors of these channels.
  template <class Real>
  int vectors() const {
    return int((channels.count + kLanes<Real> - 1) / kLanes<Real>);
  }

  template <class Real>
  Part part(int vector) const {
    const std::int64_t first = vector * kLanes<Real>, left = channels.count - first;
    return {first, left < kLanes<Real> ? int(left) : kLanes<Real>};
  }
};

// The terms of a key: its weight and that times its value, 0 where there is no key; `bad` where these may not
// be formed, `tiny` where the value is.
template <class Real>
struct Terms {
  Vector<Real> num{}, den{};
  typename Vectors<Real>::Bits bad{}, tiny{};
  Vector<Real> distance{};

  Terms(Vector<Real> key, Vector<Real> value, Vector<Real> origin) : distance(key - origin) {
    const auto near = distance <= Range<Real>::above;
    den = exponential<Real>(near ? distance : Vector<Real>{});
    den = near ? den : Vector<Real>{};
    const auto fits = near & ((den == 0) | (magnitude<Real>(value) <= Range<Real>::value));
    den = fits ? den : Vector<Real>{};
    num = den == 0 ? Vector<Real>{} : den * value;
    bad = ~fits;
    tiny = (magnitude<Real>(value) < Range<Real>::tiny) & (value != 0);
  }
};

// The sums of the rows of a tile.
template <class Real>
struct Tile {
  Vector<Real> num[kTile], den[kTile];

  // All rows begin with the same.
  Tile(Vector<Real> of_num, Vector<Real> of_den) {
    for (int i = 0; i < kTile; ++i) {
      num[i] = of_num;
      den[i] = of_den;
    }
  }
};

// A row of sums of one vector of channels: num, and beside it den.
template <class Real>
[[gnu::always_inline]] inline void put_pair(Real* to, Vector<Real> num, Vector<Real> den) {
  set(to, num);
  set(to + kLanes<Real>, den);
}

template <class Real>
[[gnu::always_inline]] inline void add_pair(const Real* x, Vector<Real>& num, Vector<Real>& den) {
  num += at(x);
  den += at(x + kLanes<Real>);
}

// Adds n rows of terms to a tile. weight(m, i) is that of term m in row i: a number, or one for each channel.
template <class Real, class Weight>
[[gnu::always_inline]] inline void accumulate(Tile<Real>& tile, const Real* terms, std::int64_t n, Weight weight) {
  Vector<Real> num[kTile], den[kTile];
  for (int i = 0; i < kTile; ++i) {
    num[i] = tile.num[i];
    den[i] = tile.den[i];
  }
  for (std::int64_t m = 0; m < n; ++m) {
    const Vector<Real> x = at(terms + m * 2 * kLanes<Real>), y = at(terms + (2 * m + 1) * kLanes<Real>);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
      const auto w = weight(m, i);
      num[i] += w * x;
      den[i] += w * y;
    }
  }
  for (int i = 0; i < kTile; ++i) {
    tile.num[i] = num[i];
    tile.den[i] = den[i];
  }
}

// In each group of 2 kHalf lanes of x and y the first half plus the second; what is of x comes first.
template <class Real, int kHalf, std::size_t... kLane>
[[gnu::always_inline]] inline Vector<Real> join_halves(
    Vector<Real> x, Vector<Real> y, std::index_sequence<kLane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, y, (kLane / kHalf * 2 * kHalf + kLane % kHalf)...) +
         __builtin_shufflevector(x, y, (kLane / kHalf * 2 * kHalf + kLane % kHalf + kHalf)...);
#else
  Vector<Real> sum;
  for (int i = 0; i < kLanes<Real>; ++i) {
    const int from = i / kHalf * 2 * kHalf + i % kHalf, of_y = from - kLanes<Real>;
    sum[i] = of_y < 0 ? x[from] + x[from + kHalf] : y[of_y] + y[of_y + kHalf];
  }
  return sum;
#endif
}

// Adds the products of n rows of gradients with rows of terms, and with those that begin one later, and so on:
// the gradients of the weights of kCells distances.
template <int kCells, class Real>
[[gnu::always_inline]] inline void add_products(
    const Real* upstream, const Real* terms, std::int64_t n, Vector<Real>* to) {
  constexpr int lanes = kLanes<Real>;
  Vector<Real> sums[kCells];
  for (int j = 0; j < kCells; ++j) sums[j] = to[j];
  for (std::int64_t row = 0; row < n; ++row) {
    const Vector<Real> of_num = at(upstream + row * 2 * lanes), of_den = at(upstream + (2 * row + 1) * lanes);
#pragma GCC unroll 8
    for (int j = 0; j < kCells; ++j) {
      const Real* const term = terms + (row + j) * 2 * lanes;
      sums[j] += of_num * at(term) - of_den * at(term + lanes);
    }
  }
  for (int j = 0; j < kCells; ++j) to[j] = sums[j];
}

// The sums over the lanes of as many vectors as one has lanes: halves of two are added side by side in one, then
// quarters, and so on.
template <class Real, int kHalf = kLanes<Real> / 2>
[[gnu::always_inline]] inline Vector<Real> sums_of(const Vector<Real>* x) {
  if constexpr (kHalf == 0) {
    return x[0];
  } else {
    Vector<Real> joined[kHalf];
    for (int i = 0; i < kHalf; ++i) {
      joined[i] = join_halves<Real, kHalf>(x[2 * i], x[2 * i + 1], std::make_index_sequence<kLanes<Real>>());
    }
    return sums_of<Real, kHalf / 2>(joined);
  }
}

// Whether a quotient of sums is as exact as Real can be; has_tiny: some of the values were.
template <class Real>
[[gnu::always_inline]] inline typename Vectors<Real>::Bits is_sound(
    Vector<Real> num, Vector<Real> den, typename Vectors<Real>::Bits has_tiny) {
  using R = Range<Real>;
  const Vector<Real> size = magnitude<Real>(num);
  const auto is_in_range = (den >= R::least) & (den <= R::most) & (size <= R::most);
  return is_in_range & (((num == 0) & ~has_tiny) | ((num != 0) & (size >= R::vanishing * den)));
}

template <class Real>
[[gnu::always_inline]] inline Vector<Real> gate(Vector<Real> query) {
  return Real(1) / (exponential_of_minus<Real>(query) + Real(1));
}

// What becomes of a mean: itself in float32, or that times the gate.
template <class Element>
struct Output {
  const Window& problem;
  Track<float> plain;
  Track<Element> gated;
  Track<const Element> q;

  explicit Output(const Task<Element>& task)
      : problem(task.problem),
        plain(task.template track<float>(problem.y)),
        gated(task.track(problem.y)),
        q(task.template track<const Element>(problem.q)) {}

  template <class Real>
  [[gnu::always_inline]] void put(std::int64_t t, Part part, Vector<Real> mean) const {
    if (problem.gated) {
      write<Real>(mean * gate<Real>(read<Real>(q[t], part)), gated[t], part);
    } else {
      write<Real>(mean, plain[t], part);
    }
  }

  // Where a pass vouches for its sums their mean, 0 if they are of nothing, else NaN: of all lanes, or of what
  // is missing from what is written already. Returns what is missing then.
  template <class Real>
  [[gnu::always_inline]] typename Vectors<Real>::Bits put_mean(
      std::int64_t t, Part part, Vector<Real> num, Vector<Real> den, typename Vectors<Real>::Bits blind,
      typename Vectors<Real>::Bits sound, bool is_written) const {
    const Vector<Real> mean = blind ? Vector<Real>{} : num / den;
    const Vector<Real> y = sound ? mean : all<Real>(Real(__builtin_nanf("")));
    if (!is_written) {
      put<Real>(t, part, y);
      return ~sound;
    }
    const auto lacking = missing<Real>(t, part);
    replace<Real>(t, part, y, lacking);
    return lacking & ~sound;
  }

  // The lanes of row t that no pass has vouched for yet.
  template <class Real>
  typename Vectors<Real>::Bits missing(std::int64_t t, Part part) const {
    const Vector<Real> y = problem.gated ? read<Real>(gated[t], part) : read<Real>(plain[t], part);
    return y != y;
  }

  // Those of other lanes stay.
  template <class Real>
  void replace(std::int64_t t, Part part, Vector<Real> mean, typename Vectors<Real>::Bits where) const {
    const Vector<Real> y = problem.gated ? read<Real>(gated[t], part) : read<Real>(plain[t], part);
    if (problem.gated) mean *= gate<Real>(read<Real>(q[t], part));
    mean = where ? mean : y;
    problem.gated ? write<Real>(mean, gated[t], part) : write<Real>(mean, plain[t], part);
  }
};

// The gradients of a row's sums: of num, and of minus den.
template <class Real>
struct Upstream {
  Vector<Real> of_num, of_den, squares;
};

template <class Element>
struct Input {
  const Window& problem;
  Track<const float> plain;
  Track<const Element> gated, q;
  Track<Element> grad_q;

  explicit Input(const Task<Element>& task)
      : problem(task.problem),
        plain(task.template track<const float>(problem.grad)),
        gated(task.template track<const Element>(problem.grad)),
        q(task.template track<const Element>(problem.q)),
        grad_q(task.track(problem.grad_q)) {}

  // From row t of the gradient of y; that of q is written. An inverse of 0 is that of a row that saw nothing.
  template <class Real>
  [[gnu::always_inline]] Upstream<Real> pass(
      std::int64_t t, Part part, Vector<Real> num, Vector<Real> inverse) const {
    const Vector<Real> mean = num * inverse;
    Vector<Real> g;
    Vector<Real> squares;
    if (problem.gated) {
      const Vector<Real> e = exponential_of_minus<Real>(read<Real>(q[t], part));
      const Vector<Real> open = Real(1) / (e + Real(1));
      g = read<Real>(gated[t], part);
      squares = g * g;
      g *= open;
      write<Real>(g * mean * (e * open), grad_q[t], part);
    } else {
      g = read<Real>(plain[t], part);
      squares = g * g;
    }
    return {g * inverse, g * inverse * mean, squares};
  }
};

template <class Real>
inline bool all_of(typename Vectors<Real>::Bits mask) {
  return !any<Real>(~mask);
}

// Arrays in a Buffer, one after another; without one, only their size is found.
class Arena {
 public:
  explicit Arena(void* data) : data_(static_cast<char*>(data)) {}

  template <class T>
  T* take(std::int64_t count) {
    char* const taken = data_ == nullptr || count == 0 ? nullptr : data_ + size_;
    size_ += (count * std::int64_t(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(taken);
  }

  std::int64_t size() const { return size_; }

 private:
  char* data_;
  std::int64_t size_ = 0;
};

}  // namespace
}  // namespace AFT_LEVEL
}  // namespace aft
