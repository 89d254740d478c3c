// AFT-simple, forward and backward, for some channels of one sequence.
//
// Exponents are taken relative to an origin, a key of the past, that moves when a key lies more than kLead
// above it: the sums are then scaled down. Sums over a block are of type Real, float for speed; what they add
// up to over the blocks is double. Where float has not the range or the digits, the task runs again in double.
//
// The rows of a block are computed in a hurry, without the cases that are rare, while noting whether there were
// any; if so they are computed again, with care. Both ways give the same bits for a row where nothing was rare:
// a result must not depend on later rows, nor on which channels share a task.
#include "levels.hpp"
#include "simple.hpp"
#include "tracks.hpp"
#include "vectors.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

// e^kLead times a value of kLargeSum is inside float's range.
constexpr float kLead = 8.0f;
constexpr float kLargeSum = 1e30f;
constexpr float kSmallValue = 1e-15f;
// The largest sum of the squares of values and of gradients.
constexpr float kLargeSquares = 1e30f;
// How far below the origin a key may lie, and the origin above the first one, until most weights are 0 or 1:
// the gradients of keys are then small differences of large terms. Keys of no weight at all do not count.
constexpr float kSaturated = 15.0f;
// Further below the origin a key's weight may be 0.
constexpr float kFar = 80.0f;
// Beyond these queries den * (1 + e^-q) may be out of float's range; times kScale it is not, and the quotient
// is the same.
constexpr float kExtremeQuery = 40.0f;
constexpr float kScale = 0x1p-60f;
// Up to this many products of queries and values double costs nothing beside the call itself.
constexpr std::int64_t kSmall = 1 << 14;
// The sums of one vector of channels: over this block, and over those before.
template <class Real>
struct Pair {
  Vector<Real> num{}, den{}, num_before, den_before;

  [[gnu::always_inline]] void add(Vector<Real> to_num, Vector<Real> to_den) {
    num += to_num;
    den += to_den;
  }
  [[gnu::always_inline]] Vector<Real> full_num() const { return num + num_before; }
  [[gnu::always_inline]] Vector<Real> full_den() const { return den + den_before; }

  void scale(Vector<Real> factor) {
    num *= factor;
    den *= factor;
    num_before *= factor;
    den_before *= factor;
  }
};

template <class Real>
struct Column : Pair<Real> {
  Vector<Real> origin;
};

template <class Real>
using Doubles = typename Vectors<Real>::Double;

template <class Real>
constexpr int kMostVectors = kMostChannels / Vectors<Real>::lanes;

template <class Real, class At>
inline int number_of(At at) {
  return int(at.first) / Vectors<Real>::lanes;
}

// Sums over time for each channel.
template <class Real>
struct Totals {
  alignas(64) double num[kMostChannels] = {}, den[kMostChannels] = {};

  void open(Pair<Real>& sums, std::int64_t c) const {
    Doubles<Real> x;
    std::memcpy(&x, num + c, sizeof x);
    sums.num_before = __builtin_convertvector(x, Vector<Real>);
    std::memcpy(&x, den + c, sizeof x);
    sums.den_before = __builtin_convertvector(x, Vector<Real>);
  }

  void close(const Pair<Real>& sums, std::int64_t c) {
    add(sums.num, num + c);
    add(sums.den, den + c);
  }

  void scale(Vector<Real> factor, std::int64_t c) {
    multiply(factor, num + c);
    multiply(factor, den + c);
  }

  [[gnu::always_inline]] static void add(Vector<Real> here, double* total) {
    Doubles<Real> x;
    std::memcpy(&x, total, sizeof x);
    x += __builtin_convertvector(here, Doubles<Real>);
    std::memcpy(total, &x, sizeof x);
  }

  [[gnu::always_inline]] static void multiply(Vector<Real> factor, double* total) {
    Doubles<Real> x;
    std::memcpy(&x, total, sizeof x);
    x *= __builtin_convertvector(factor, Doubles<Real>);
    std::memcpy(total, &x, sizeof x);
  }
};

template <class Real>
struct Running {
  Totals<Real> totals;
  alignas(64) Real origin[kMostChannels];  // below every number while there has been no key
  alignas(64) Real first[kMostChannels];   // the first origin
  Real lead = Real(kLead);
  bool saturated = false;
  typename Vectors<Real>::Bits large{};
  Vector<Real> least{};  // how far a key of some weight is from its origin
  Vector<Real> risen{};  // how far an origin is from the first

  Running() {
    fill(origin, kMostChannels, Real(kLowest));
    fill(first, kMostChannels, Real(kLowest));
  }

  // Goes on from a state of these channels. The origin then is the largest key at every time, as in a state.
  void begin_from(const State& state, std::int64_t offset, std::int64_t count) {
    lead = 0;
    for (std::int64_t c = 0; c < count; ++c) {
      totals.num[c] = state.num[offset + c];
      totals.den[c] = state.den[offset + c];
      const double max = state.max[offset + c];
      origin[c] = first[c] = Real(max < kLowest ? kLowest : max);
    }
  }

  void write(const State& state, std::int64_t offset, std::int64_t count) const {
    for (std::int64_t c = 0; c < count; ++c) {
      state.num[offset + c] = totals.num[c];
      state.den[offset + c] = totals.den[c];
      state.max[offset + c] = totals.den[c] > 0 ? double(origin[c]) : -__builtin_inf();
    }
  }

  void restore(const double* saved, std::int64_t channels, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) {
      totals.num[c] = saved[kNum * channels + c];
      totals.den[c] = saved[kDen * channels + c];
      origin[c] = first[c] = Real(saved[kOrigin * channels + c]);
    }
  }

  void save(double* saved, std::int64_t channels, std::int64_t count) const {
    for (std::int64_t c = 0; c < count; ++c) {
      saved[kNum * channels + c] = totals.num[c];
      saved[kDen * channels + c] = totals.den[c];
      saved[kOrigin * channels + c] = origin[c];
      saved[kDouble * channels + c] = 0.0;
    }
  }

  void open(Column<Real>& column, std::int64_t c) const {
    totals.open(column, c);
    column.origin = get<Real>(origin, Whole{c});
  }

  void close(const Column<Real>& column, std::int64_t c) {
    totals.close(column, c);
    put<Real>(column.origin, origin, Whole{c});
    large |= ~(magnitude<Real>(column.full_num()) < Real(kLargeSum));
  }

  // Whether the sums were inside the range of Real, and not of values near its end.
  bool has_range(std::int64_t n) const {
    if (sizeof(Real) == sizeof(double)) return true;
    bool tiny = false;
    for (std::int64_t c = 0; c < n; ++c) {
      const double size = totals.num[c] < 0 ? -totals.num[c] : totals.num[c];
      tiny |= size != 0 && size < kSmallValue * totals.den[c];
    }
    return !tiny && !any<Real>(large);
  }

  // Whether keys lie so far apart that gradients need more digits than float's.
  bool is_saturated() const {
    return saturated || any<Real>((least < Real(-kSaturated)) | (risen > Real(kSaturated)));
  }

  // Moves the origins that these keys lie far above. True if there were any; the factor then says how far.
  bool make_room(Column<Real>& column, Vector<Real> key, std::int64_t c, Vector<Real>& factor) {
    const auto above = key - column.origin > lead;
    if (!any<Real>(above)) return false;
    const Vector<Real> moved = above ? key : column.origin;
    factor = exponential<Real>(column.origin - moved);
    column.scale(factor);
    totals.scale(factor, c);
    column.origin = moved;
    const Vector<Real> old = get<Real>(first, Whole{c});
    const Vector<Real> begun = old == Real(kLowest) ? moved : old;
    put<Real>(begun, first, Whole{c});
    risen = maximum(risen, moved - begun);
    return true;
  }

  // The origin of channels without one is their first key.
  void find_origin(Column<Real>& column, Vector<Real> key) const {
    column.origin = column.origin == Real(kLowest) ? key : column.origin;
  }

  void close_first(const Column<Real>& column, std::int64_t c) {
    const Vector<Real> old = get<Real>(first, Whole{c});
    put<Real>(old == Real(kLowest) ? column.origin : old, first, Whole{c});
  }
};

// A key's weight, and its value as far as it counts: an absent key's (-inf) may be anything.
template <class Real>
struct Term {
  Vector<Real> weight, value;

  Term(Vector<Real> distance, Vector<Real> of_key)
      : weight(exponential<Real>(distance)), value(weight == 0 ? Vector<Real>{} : of_key) {}
};

template <class Element>
struct Sequence {
  const Simple& problem;
  Channels at;

  template <class T = Element>
  Track<T> track(const Rows& rows) const {
    return track_of<T>(rows, at);
  }

  bool sees(std::int64_t time) const { return time < problem.keys && is_visible(problem.hidden, at, time); }

  bool sees_all(std::int64_t start, std::int64_t end) const {
    if (problem.hidden.data == nullptr) return end <= problem.keys;
    for (std::int64_t t = start; t < end; ++t) {
      if (!sees(t)) return false;
    }
    return true;
  }

  // Whether the gradients need the digits of double is noted beside the last of the saved sums.
  void mark(bool needs_digits) const { fill(needs_double(), at.count, needs_digits ? 1.0 : 0.0); }

  bool marked() const {
    for (std::int64_t c = 0; c < at.count; ++c) {
      if (needs_double()[c] != 0) return true;
    }
    return false;
  }

  double* needs_double() const { return saved(problem.blocks()) + kDouble * problem.channels; }

  // Where these channels begin in a State.
  std::int64_t in_state() const { return at.batch * problem.channels + at.first; }

  double* saved(std::int64_t block) const {
    const std::int64_t entry = at.batch * (problem.blocks() + 1) + block;
    return problem.saved + entry * kSavedFields * problem.channels + at.first;
  }
};

inline bool is_small(const Simple& problem) {
  return problem.batches * problem.queries * problem.keys * problem.channels <= kSmall;
}

inline std::int64_t end_of_block(std::int64_t start, std::int64_t rows) {
  return start + kBlock < rows ? start + kBlock : rows;
}

// Calls hurry(c, n) for the n whole vectors of channels from c on: row by row, as memory is read fastest. Where
// it says that it could not, for each of them alone, and where it still could not, care(at).
template <class Real, class Hurry, class Care>
[[gnu::always_inline]] inline void for_each_group(std::int64_t count, bool hurries, Hurry hurry, Care care) {
  constexpr int lanes = Vectors<Real>::lanes;
  const std::int64_t whole = count / lanes;
  if (hurries && whole > 0 && hurry(0, whole)) {
    if (whole * lanes < count) care(Rest{whole * lanes, int(count - whole * lanes)});
    return;
  }
  for_each_vector<Real>(count, [&](auto at) {
    constexpr bool is_whole = sizeof(at) == sizeof(Whole);
    if (!is_whole || !hurries || whole == 1 || !hurry(at.first, 1)) care(at);
  });
}

// What becomes of the sums at each query: nothing, their quotient, or that times the gate.
struct Nowhere {
  template <class Real, class At>
  void write(std::int64_t, At, Vector<Real>, Vector<Real>) const {}
  void write_inside(std::int64_t, std::int64_t, Vector<float>, Vector<float>, Extremes&) const {}
};

struct Plain {
  Track<float> y;

  template <class Real, class At>
  [[gnu::always_inline]] void write(std::int64_t t, At at, Vector<Real> num, Vector<Real> den) const {
    store<Real>(num / den, y[t], at);
  }

  [[gnu::always_inline]] void write_inside(
      std::int64_t t, std::int64_t c, Vector<float> num, Vector<float> den, Extremes&) const {
    store<float>(num / den, y[t], Whole{c});
  }
};

template <class Real>
inline Vector<Real> scale_of(Vector<Real> query) {
  return query < Real(-kExtremeQuery) ? all<Real>(kScale) : all<Real>(1);
}

template <class Element>
struct Gated {
  Track<const Element> q;
  Track<Element> y;

  template <class Real, class At>
  [[gnu::always_inline]] void write(std::int64_t t, At at, Vector<Real> num, Vector<Real> den) const {
    const Vector<Real> query = load<Real>(q[t], at);
    const Vector<Real> scale = scale_of<Real>(query);
    const Vector<Real> of_gate = exponential_of_minus<Real>(query) * scale + scale;
    store<Real>(num * scale / (den * of_gate), y[t], at);
  }

  [[gnu::always_inline]] void write_inside(
      std::int64_t t, std::int64_t c, Vector<float> num, Vector<float> den, Extremes& queries) const {
    const Vector<float> query = load<float>(q[t], Whole{c});
    queries.include(query);
    store<float>(num / (den * (exponential_inside<float>(-query) + 1.0f)), y[t], Whole{c});
  }
};

template <class Element, class Real>
struct Forward {
  static constexpr bool kCanHurry = sizeof(Real) == sizeof(float);
  const Sequence<Element> sequence;
  const Simple& problem;
  const std::int64_t count;
  const Track<const Element> k, v;
  Running<Real> sums;

  Forward(const Simple& problem, const Channels& at)
      : sequence{problem, at},
        problem(problem),
        count(at.count),
        k(sequence.template track<const Element>(problem.k)),
        v(sequence.template track<const Element>(problem.v)) {}

  // Writes the running sums where they are wanted, and y unless that is there already.
  void run(bool writes_y) {
    if (problem.is_stream()) sums.begin_from(problem.before, sequence.in_state(), count);
    if (!writes_y) {
      run_to(Nowhere{});
    } else if (problem.gated) {
      run_to(Gated<Element>{sequence.template track<const Element>(problem.q), sequence.track(problem.y)});
    } else {
      run_to(Plain{sequence.template track<float>(problem.y)});
    }
    save(problem.blocks());
    if (problem.is_stream()) sums.write(problem.after, sequence.in_state(), count);
  }

  template <class Output>
  void run_to(const Output& output) {
    if (problem.causal) {
      for (std::int64_t t = 0; t < problem.queries; t += kBlock) {
        save(t / kBlock);
        add(t, end_of_block(t, problem.queries), output);
      }
    } else {
      save(0);
      for (std::int64_t s = 0; s < problem.keys; s += kBlock) {
        add(s, end_of_block(s, problem.keys), Nowhere{});
      }
      for (std::int64_t t = 0; t < problem.queries; t += kBlock) {
        emit(t, end_of_block(t, problem.queries), output);
      }
    }
  }

  void save(std::int64_t block) const {
    if (problem.saved != nullptr) sums.save(sequence.saved(block), problem.channels, count);
  }

  // The keys of a block of rows, and the result at each of them.
  template <class Output>
  void add(std::int64_t start, std::int64_t end, const Output& output) {
    const auto hurry = [&](std::int64_t c, std::int64_t n) {
      if constexpr (kCanHurry) return add_in_a_hurry(start, end, c, n, output);
      return false;
    };
    for_each_group<Real>(
        count, kCanHurry && sequence.sees_all(start, end), hurry,
        [&](auto at) { add_with_care(start, end, at, output); });
  }

  template <class Output>
  [[gnu::noinline]] bool add_in_a_hurry(
      std::int64_t start, std::int64_t end, std::int64_t c, std::int64_t n, const Output& to) {
    constexpr int lanes = Vectors<Real>::lanes;
    const Output output = to;
    const Track<const Element> k = this->k, v = this->v;
    Column<Real> columns[kMostVectors<Real>];
    for (std::int64_t i = 0; i < n; ++i) {
      sums.open(columns[i], c + i * lanes);
      sums.find_origin(columns[i], load<Real>(k[start], Whole{c + i * lanes}));
    }
    Extremes distances, queries;
    for (std::int64_t t = start; t < end; ++t) {
      for (std::int64_t i = 0; i < n; ++i) {
        const Whole at{c + i * lanes};
        Column<Real>& column = columns[i];
        const Vector<Real> distance = load<Real>(k[t], at) - column.origin;
        distances.include(distance);
        const Vector<Real> weight = exponential_inside<Real>(distance);
        column.add(weight * load<Real>(v[t], at), weight);
        output.write_inside(t, at.first, column.full_num(), column.full_den(), queries);
      }
    }
    if (!distances.lie_between(-kFar, kLead) || !queries.lie_between(-kExtremeQuery, kExtremeQuery)) {
      return false;
    }
    sums.saturated |= !distances.lie_between(-kSaturated, kLead);
    for (std::int64_t i = 0; i < n; ++i) {
      sums.close_first(columns[i], c + i * lanes);
      sums.close(columns[i], c + i * lanes);
    }
    return true;
  }

  template <class At, class Output>
  void add_with_care(std::int64_t start, std::int64_t end, At at, const Output& output) {
    Column<Real> column;
    sums.open(column, at.first);
    Vector<Real> factor;
    for (std::int64_t t = start; t < end; ++t) {
      if (sequence.sees(t)) {
        const Vector<Real> key = load<Real>(k[t], at);
        sums.make_room(column, key, at.first, factor);
        const Vector<Real> distance = key - column.origin;
        const Term<Real> term(distance, load<Real>(v[t], at));
        column.add(term.weight * term.value, term.weight);
        sums.least = key != -__builtin_inff() && distance < sums.least ? distance : sums.least;
      }
      write(output, t, at, column.full_num(), column.full_den());
    }
    sums.close(column, at.first);
  }

  // Queries that see every key.
  template <class Output>
  void emit(std::int64_t start, std::int64_t end, const Output& output) const {
    Column<Real> columns[kMostVectors<Real>];
    for_each_vector<Real>(count, [&](auto at) { sums.open(columns[number_of<Real>(at)], at.first); });
    for (std::int64_t t = start; t < end; ++t) {
      for_each_vector<Real>(count, [&](auto at) {
        const Column<Real>& column = columns[number_of<Real>(at)];
        write(output, t, at, column.num_before, column.den_before);
      });
    }
  }

  // Where nothing was summed, 0 / 1 is the mean of nothing.
  template <class Output, class At>
  [[gnu::always_inline]] static void write(
      const Output& output, std::int64_t t, At at, Vector<Real> num, Vector<Real> den) {
    output.template write<Real>(t, at, num, den == 0 ? all<Real>(1) : den);
  }
};

// What the way back through a block wants of one row.
template <class Real>
struct Kept {
  Vector<Real> weight, of_num, of_den;
};

template <class Element, class Real>
struct Backward {
  static constexpr bool kCanHurry = sizeof(Real) == sizeof(float);
  const Sequence<Element> sequence;
  const Simple& problem;
  const std::int64_t count;
  const Track<const Element> q, k, v, grad;
  const Track<const float> grad_of_mean;
  const Track<Element> grad_q, grad_k, grad_v;
  Running<Real> sums;
  Totals<Real> to;         // gradients of num and of minus den, over the queries from here on
  Vector<Real> squares{};  // of values and gradients

  Backward(const Simple& problem, const Channels& at)
      : sequence{problem, at},
        problem(problem),
        count(at.count),
        q(sequence.template track<const Element>(problem.q)),
        k(sequence.template track<const Element>(problem.k)),
        v(sequence.template track<const Element>(problem.v)),
        grad(sequence.template track<const Element>(problem.grad)),
        grad_of_mean(sequence.template track<const float>(problem.grad)),
        grad_q(sequence.track(problem.grad_q)),
        grad_k(sequence.track(problem.grad_k)),
        grad_v(sequence.track(problem.grad_v)) {}

  // False where float does not suffice.
  bool run() {
    sums.restore(sequence.saved(problem.blocks()), problem.channels, count);
    const bool has_range = sums.has_range(count);
    if (problem.is_stream()) {
      stream();
    } else if (problem.causal) {
      causal();
    } else {
      bidirectional();
    }
    return !kCanHurry || (has_range && !any<Real>(sums.large | (squares > Real(kLargeSquares))));
  }

  void causal() {
    for (std::int64_t s = problem.queries; s < problem.keys; ++s) {
      for_each_vector<Real>(count, [&](auto at) { nothing(s, at); });
    }
    for (std::int64_t block = problem.blocks(); block-- > 0;) {
      const std::int64_t start = block * kBlock, end = end_of_block(start, problem.queries);
      sums.restore(sequence.saved(block), problem.channels, count);
      problem.gated ? through_block<true>(start, end) : through_block<false>(start, end);
    }
  }

  void stream() {
    const std::int64_t offset = sequence.in_state();
    sums.lead = 0;
    for (std::int64_t c = 0; c < count; ++c) {
      to.num[c] = problem.grad_after.num[offset + c];
      to.den[c] = -problem.grad_after.den[offset + c];
    }
    causal();
    for (std::int64_t c = 0; c < count; ++c) {
      problem.grad_before.num[offset + c] = to.num[c];
      problem.grad_before.den[offset + c] = -to.den[c];
    }
  }

  template <bool kGated>
  void through_block(std::int64_t start, std::int64_t end) {
    const auto hurry = [&](std::int64_t c, std::int64_t n) {
      if constexpr (kCanHurry) return in_a_hurry<kGated>(start, end, c, n);
      return false;
    };
    for_each_group<Real>(
        count, kCanHurry && sequence.sees_all(start, end), hurry,
        [&](auto at) { with_care<kGated>(start, end, at); });
  }

  // The forward pass over a block again, and then back.
  template <bool kGated>
  [[gnu::noinline]] bool in_a_hurry(std::int64_t start, std::int64_t end, std::int64_t c, std::int64_t n) {
    constexpr int lanes = Vectors<Real>::lanes;
    const Track<const Element> q = this->q, k = this->k, v = this->v, grad = this->grad;
    const Track<const float> grad_of_mean = this->grad_of_mean;
    const Track<Element> grad_q = this->grad_q, grad_k = this->grad_k, grad_v = this->grad_v;
    Kept<Real> kept[kBlock][kMostVectors<Real>];
    Column<Real> columns[kMostVectors<Real>];
    for (std::int64_t i = 0; i < n; ++i) {
      sums.open(columns[i], c + i * lanes);
      sums.find_origin(columns[i], load<Real>(k[start], Whole{c + i * lanes}));
    }
    Extremes distances, queries;
    Vector<Real> squares = this->squares;
    for (std::int64_t t = start; t < end; ++t) {
      for (std::int64_t i = 0; i < n; ++i) {
        const Whole at{c + i * lanes};
        Column<Real>& column = columns[i];
        const Vector<Real> distance = load<Real>(k[t], at) - column.origin;
        distances.include(distance);
        const Vector<Real> weight = exponential_inside<Real>(distance), value = load<Real>(v[t], at);
        squares += value * value;
        column.add(weight * value, weight);
        Kept<Real>& row = kept[t - start][i];
        row.weight = weight;
        const Vector<Real> num = column.full_num(), den = column.full_den();
        if constexpr (kGated) {
          const Vector<Real> query = load<Real>(q[t], at), g = load<Real>(grad[t], at);
          queries.include(query);
          squares += g * g;
          const Vector<Real> e = exponential_inside<Real>(-query), of_gate = e + Real(1);
          const Vector<Real> inverse = Real(1) / (den * of_gate), y = num * inverse;
          store<Real>((g * y) * (e * (den * inverse)), grad_q[t], at);
          row.of_num = g * inverse;
          row.of_den = row.of_num * (y * of_gate);
        } else {
          const Vector<Real> g = load<Real>(grad_of_mean[t], at);
          const Vector<Real> inverse = Real(1) / den;
          squares += g * g;
          row.of_num = g * inverse;
          row.of_den = row.of_num * (num * inverse);
        }
      }
    }
    if (!distances.lie_between(-kFar, kLead) || !queries.lie_between(-kExtremeQuery, kExtremeQuery)) {
      return false;
    }
    this->squares = squares;
    Pair<Real> to[kMostVectors<Real>];
    for (std::int64_t i = 0; i < n; ++i) this->to.open(to[i], c + i * lanes);
    for (std::int64_t t = end; t-- > start;) {
      for (std::int64_t i = 0; i < n; ++i) {
        const Whole at{c + i * lanes};
        const Kept<Real>& row = kept[t - start][i];
        to[i].add(row.of_num, row.of_den);
        const Vector<Real> num = to[i].full_num();
        store<Real>(row.weight * num, grad_v[t], at);
        store<Real>(row.weight * (num * load<Real>(v[t], at) - to[i].full_den()), grad_k[t], at);
      }
    }
    for (std::int64_t i = 0; i < n; ++i) this->to.close(to[i], c + i * lanes);
    return true;
  }

  template <bool kGated, class At>
  void with_care(std::int64_t start, std::int64_t end, At at) {
    Kept<Real> kept[kBlock];
    Vector<Real> factors[kBlock];
    bool moved[kBlock];
    Column<Real> column;
    sums.open(column, at.first);
    for (std::int64_t t = start; t < end; ++t) {
      const std::int64_t i = t - start;
      moved[i] = false;
      if (sequence.sees(t)) {
        const Vector<Real> key = load<Real>(k[t], at);
        moved[i] = sums.make_room(column, key, at.first, factors[i]);
        const Term<Real> term(key - column.origin, load<Real>(v[t], at));
        column.add(term.weight * term.value, term.weight);
        kept[i].weight = term.weight;
      }
      pass_up<kGated>(t, at, column.full_num(), column.full_den(), kept[i]);
    }
    Pair<Real> to;
    this->to.open(to, at.first);
    for (std::int64_t t = end; t-- > start;) {
      const std::int64_t i = t - start;
      to.add(kept[i].of_num, kept[i].of_den);
      if (sequence.sees(t)) {
        pass_to_key(t, at, kept[i].weight, to.full_num(), to.full_den());
      } else if (t < problem.keys) {
        nothing(t, at);
      }
      if (moved[i]) {
        to.scale(factors[i]);
        this->to.scale(factors[i], at.first);
      }
    }
    this->to.close(to, at.first);
  }

  // The gradients of row t of q, and of num and minus den through it.
  template <bool kGated, class At>
  [[gnu::always_inline]] void pass_up(
      std::int64_t t, At at, Vector<Real> num, Vector<Real> den, Kept<Real>& kept) {
    if constexpr (kGated) {
      const Vector<Real> query = load<Real>(q[t], at), g = load<Real>(grad[t], at);
      const Vector<Real> scale = scale_of<Real>(query), e = exponential_of_minus<Real>(query) * scale;
      const Vector<Real> of_gate = e + scale, inverse = inverse_of(den, of_gate);
      const Vector<Real> g_scaled = g * scale;
      squares += g * g;
      store<Real>((g_scaled * (num * inverse)) * (e * (den * inverse)), grad_q[t], at);
      kept.of_num = g_scaled * inverse;
      kept.of_den = kept.of_num * ((num * inverse) * of_gate);
    } else {
      const Vector<Real> g = load<Real>(grad_of_mean[t], at), inverse = inverse_of(den, all<Real>(1));
      squares += g * g;
      kept.of_num = g * inverse;
      kept.of_den = kept.of_num * (num * inverse);
    }
  }

  // 0 where nothing was summed.
  static Vector<Real> inverse_of(Vector<Real> den, Vector<Real> times) {
    const Vector<Real> inverse = Real(1) / (den == 0 ? all<Real>(1) : den * times);
    return den == 0 ? Vector<Real>{} : inverse;
  }

  // Row t of the gradient of the mean, after that of q.
  template <bool kGated, class At>
  [[gnu::always_inline]] Vector<Real> pass_to_query(std::int64_t t, At at, Vector<Real> mean) {
    if constexpr (!kGated) {
      const Vector<Real> g = load<Real>(grad_of_mean[t], at);
      squares += g * g;
      return g;
    } else {
      const Vector<Real> e = exponential_of_minus<Real>(load<Real>(q[t], at)), g = load<Real>(grad[t], at);
      const Vector<Real> gate = Real(1) / (e + Real(1)), of_mean = g * gate;
      squares += g * g;
      store<Real>(of_mean * mean * (e * gate), grad_q[t], at);
      return of_mean;
    }
  }

  template <class At>
  [[gnu::always_inline]] void pass_to_key(
      std::int64_t s, At at, Vector<Real> weight, Vector<Real> to_num, Vector<Real> to_den) {
    const Vector<Real> value = weight == 0 ? Vector<Real>{} : load<Real>(v[s], at);
    squares += value * value;
    store<Real>(weight * to_num, grad_v[s], at);
    store<Real>(weight * (to_num * value - to_den), grad_k[s], at);
  }

  template <class At>
  void nothing(std::int64_t s, At at) const {
    store<Real>(Vector<Real>{}, grad_k[s], at);
    store<Real>(Vector<Real>{}, grad_v[s], at);
  }

  void bidirectional() {
    for (std::int64_t t = 0; t < problem.queries; t += kBlock) {
      const std::int64_t end = end_of_block(t, problem.queries);
      problem.gated ? gather<true>(t, end) : gather<false>(t, end);
    }
    for (std::int64_t s = 0; s < problem.keys; s += kBlock) spread(s, end_of_block(s, problem.keys));
  }

  // The gradients of queries, and their sums for the keys: all queries have one mean.
  template <bool kGated>
  void gather(std::int64_t start, std::int64_t end) {
    Vector<Real> inverses[kMostVectors<Real>], means[kMostVectors<Real>];
    Pair<Real> here[kMostVectors<Real>];  // only num: the gradient of the mean
    for_each_vector<Real>(count, [&](auto at) {
      const int i = number_of<Real>(at);
      Column<Real> column;
      sums.open(column, at.first);
      inverses[i] = inverse_of(column.den_before, all<Real>(1));
      means[i] = column.num_before * inverses[i];
    });
    for (std::int64_t t = start; t < end; ++t) {
      for_each_vector<Real>(count, [&](auto at) {
        const int i = number_of<Real>(at);
        here[i].num += pass_to_query<kGated>(t, at, means[i]);
      });
    }
    for_each_vector<Real>(count, [&](auto at) {
      const int i = number_of<Real>(at);
      here[i].num *= inverses[i];
      here[i].den = here[i].num * means[i];
      to.close(here[i], at.first);
    });
  }

  void spread(std::int64_t start, std::int64_t end) {
    Pair<Real> to[kMostVectors<Real>];
    for_each_vector<Real>(count, [&](auto at) { this->to.open(to[number_of<Real>(at)], at.first); });
    for (std::int64_t s = start; s < end; ++s) {
      const bool sees = sequence.sees(s);
      for_each_vector<Real>(count, [&](auto at) {
        if (!sees) return nothing(s, at);
        const Pair<Real>& sum = to[number_of<Real>(at)];
        const Vector<Real> distance = load<Real>(k[s], at) - get<Real>(sums.origin, Whole{at.first});
        pass_to_key(s, at, exponential<Real>(distance), sum.num_before, sum.den_before);
      });
    }
  }
};

template <class Element>
void forward(const Simple& problem, const Channels& at) {
  if (problem.is_stream()) return Forward<Element, double>(problem, at).run(true);
  Forward<Element, float> quick(problem, at);
  quick.run(true);
  const bool has_range = quick.sums.has_range(at.count);
  // The backward pass may want sums of more digits than these.
  const bool needs_digits = problem.saved != nullptr && (is_small(problem) || quick.sums.is_saturated());
  if (!has_range || needs_digits) Forward<Element, double>(problem, at).run(!has_range);
  if (problem.saved != nullptr) quick.sequence.mark(needs_digits);
}

template <class Element>
void backward(const Simple& problem, const Channels& at) {
  const bool needs_digits = problem.is_stream() || Sequence<Element>{problem, at}.marked();
  if (needs_digits || !Backward<Element, float>(problem, at).run()) {
    Backward<Element, double>(problem, at).run();
  }
}

void simple_forward(const Simple& problem, const Channels& at) {
  (problem.bfloat16 ? forward<Bfloat16> : forward<float>)(problem, at);
}

void simple_backward(const Simple& problem, const Channels& at) {
  (problem.bfloat16 ? backward<Bfloat16> : backward<float>)(problem, at);
}

}  // namespace

void window_forward(const Window& problem, const Channels& at, std::int64_t slot);
void window_backward(const Window& problem, const Channels& at, std::int64_t slot);
RowOfBias weigh(const Window& problem, std::int64_t batch, std::int64_t t, float* row);

extern const Level kLevel;
const Level kLevel = {AFT_LEVEL_NAME, simple_forward, simple_backward, window_forward,
                      window_backward, weigh};

}  // namespace AFT_LEVEL
}  // namespace aft
