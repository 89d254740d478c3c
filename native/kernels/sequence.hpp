// AFT-local, and AFT-conv over a sequence, for some channels of one sequence.
//
// Rows are taken in chunks, whose exponents have one origin: in a causal problem a key of the past that all
// earlier ones exceed by little, else the largest key. The terms of a chunk's keys are formed once. Rows of a
// tile see the same keys but for the window's ends, so that all weights of the tile are a small matrix: exp(w)
// inside the window, 1 outside it, 0 where a key is later than a causal query. What lies before and after the
// tile's keys is summed once for all of its rows.
//
// Backward, keys take the place of queries: the gradients of sums are summed over windows of queries.
#pragma once

#include "window_kernel.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

template <class Element, class Real>
class Sequence {
  using Numbers = Vector<Real>;
  using Doubles = typename Vectors<Real>::Double;
  using Bits = typename Vectors<Real>::Bits;
  using Bit = typename Vectors<Real>::Bit;
  using Limits = Range<Real>;
  static constexpr int lanes = kLanes<Real>;
  static constexpr std::int64_t kAhead = 8;  // rows to fetch before they are read
  static constexpr std::int64_t pair = 2 * lanes;  // a row of sums: num and den of one vector of channels

 public:
  Sequence(const Window& problem, const Channels& at, bool is_backward)
      : task_{problem, at},
        problem_(problem),
        k_(task_.template track<const Element>(problem.k)),
        v_(task_.template track<const Element>(problem.v)),
        vectors_(task_.template vectors<Real>()),
        width_(vectors_ * lanes),
        span_(problem.behind + problem.ahead),
        chunks_(count_chunks(problem)),
        key_rows_((kChunk + problem.offset + kTile - 1) / kTile * kTile),
        memory_(lay_out(nullptr, is_backward)) {
    lay_out(memory_.data(), is_backward);
    has_small_bias_ = problem.kernel == nullptr || read_kernel();
    begin();
  }

  // Whether biases that all rows share are in the range of this pass.
  bool is_usable() const { return has_small_bias_; }

  // Writes y, or where it is written already only what is missing. False if anything still is.
  bool forward(bool is_written) {
    const Output<Element> output(task_);
    Bits unsound{};
    for (std::int64_t c = 0; c * kChunk < problem_.queries; ++c) {
      if (problem_.causal) mark(c);
      if (is_written && is_complete(output, c * kChunk, rows_of(c))) continue;
      form_terms(c);
      sum_rows(c, [&](std::int64_t t, int vector, Numbers num, Numbers den, Bits blind, Bits sound) {
        const Part part = task_.template part<Real>(vector);
        unsound |= output.template put_mean<Real>(t, part, num, den, blind, sound, is_written);
      });
    }
    return !any<Real>(unsound);
  }

  // False, and no gradient of the bias, where another pass has to do it.
  bool backward(std::int64_t slot) {
    if (!pass_to_queries()) return false;
    pass_to_keys(slot);
    return true;
  }

 private:
  // Some rows of an array: the others hold nothing.
  struct Filled {
    std::int64_t begin, end;
  };

  // Those of `count` rows, from position `first` on, that are among the positions from 0 to `end`.
  static Filled filled(std::int64_t first, std::int64_t count, std::int64_t end) {
    const std::int64_t last = end - first < count ? end - first : count;
    return {first < 0 ? -first : 0, last};
  }

  static std::int64_t count_chunks(const Window& problem) {
    const std::int64_t keys = problem.causal ? 0 : problem.keys - problem.offset;
    const std::int64_t rows = problem.queries > keys ? problem.queries : keys;
    return rows > 0 ? (rows + kChunk - 1) / kChunk : 0;
  }

  // Divides the memory, and returns its size.
  std::int64_t lay_out(void* data, bool is_backward) {
    Arena arena(data);
    const std::int64_t all = vectors_ * pair;
    origin_ = arena.take<Real>(chunks_ * width_);
    sums_before_ = arena.take<double>(chunks_ * all);
    sums_after_ = arena.take<double>(problem_.causal ? 0 : chunks_ * all);
    top_ = arena.take<Real>(chunks_ * width_);
    none_ = arena.take<double>(all);
    total_ = arena.take<double>(all);
    terms_ = arena.take<Real>((kChunk + span_) * all);
    right_ = arena.take<Real>(key_rows_ / kTile * all);
    left_ = arena.take<Real>(all);
    current_ = arena.take<Real>(width_);
    largest_ = arena.take<Real>(width_);
    squares_ = arena.take<Real>(width_);
    farthest_ = arena.take<Real>(width_);
    rare_ = arena.take<Bits>(vectors_);
    present_ = arena.take<Bits>(vectors_);
    tiny_ = arena.take<Bits>(vectors_);
    const bool by_distance = problem_.kernel != nullptr;
    kernel_ = arena.take<Real>(by_distance ? padded_cells() * width_ : 0);
    weights_ = arena.take<Real>(by_distance ? 0 : (span_ + kTile) * kTile);
    row_ = arena.take<Real>(by_distance ? 0 : span_ + 1 + lanes);
    if (is_backward) {
      flipped_ = arena.take<Real>(by_distance ? padded_cells() * width_ : 0);
      upstream_ = arena.take<Real>(problem_.queries * all);
      seen_ = arena.take<Real>((key_rows_ + span_) * all);
      upstream_before_ = arena.take<double>(problem_.causal ? 0 : chunks_ * all);
    }
    return arena.size();
  }

  std::int64_t padded_cells() const { return span_ + 1 + 2 * (kTile - 1); }
  std::int64_t rows_of(std::int64_t c) const {
    const std::int64_t left = problem_.queries - c * kChunk;
    return left < kChunk ? left : kChunk;
  }
  // The position that the first of a chunk's terms belongs to.
  std::int64_t first_term(std::int64_t c) const { return c * kChunk + problem_.offset - problem_.behind; }
  // Those of a tile's terms, which begin at a row.
  Filled in_tile(Filled range, std::int64_t row) const {
    const std::int64_t begin = range.begin - row, end = range.end - row, all = span_ + kTile;
    return {begin > 0 ? begin : 0, end < all ? end : all};
  }

  Filled filled_terms(std::int64_t c) const { return filled(first_term(c), kChunk + span_, problem_.keys); }
  const double* before(std::int64_t c) const { return sums_before_ + c * vectors_ * pair; }
  const double* after(std::int64_t c) const { return problem_.causal ? none_ : sums_after_ + c * vectors_ * pair; }
  const Real* origin(std::int64_t c) const { return origin_ + c * width_; }
  // Each vector of channels has its rows next to one another: those of a window fit the nearest cache.
  Real* terms(int vector) const { return terms_ + vector * (kChunk + span_) * pair; }
  Real* upstream(int vector) const { return upstream_ + vector * problem_.queries * pair; }
  Real* seen(int vector) const { return seen_ + vector * (key_rows_ + span_) * pair; }

  // The weights of cells beside the kernel's, from a table of biases padded with those of no window.
  bool read_kernel() {
    Bits large{};
    for (std::int64_t row = 0; row < padded_cells(); ++row) {
      const std::int64_t cell = row - (kTile - 1);
      const Real outside = cell > span_ && problem_.causal ? Real(kNothing) : Real(0);
      for (int i = 0; i < vectors_; ++i) {
        Numbers bias = all<Real>(outside);
        if (cell >= 0 && cell <= span_) {
          const Part part = task_.template part<Real>(i);
          bias = read<Real>(problem_.kernel + cell * problem_.channels + task_.channels.first, part);
          large |= ~((magnitude<Real>(bias) <= Limits::bias) | (bias == Real(kNothing)));
          const Bits wide = magnitude<Real>(bias) > Limits::saturated_bias;
          is_saturated_ |= any<Real>(wide & (bias != Real(kNothing)));
        }
        set(kernel_ + (i * padded_cells() + row) * lanes, exponential<Real>(large ? Numbers{} : bias));
      }
    }
    for (std::int64_t row = 0; flipped_ != nullptr && row < padded_cells(); ++row) {
      for (int i = 0; i < vectors_; ++i) {
        const std::int64_t last = (i + 1) * padded_cells() - 1;
        set(flipped_ + (last - row) * lanes, at(kernel_ + (i * padded_cells() + row) * lanes));
      }
    }
    return !any<Real>(large);
  }

  // The origin of each chunk, and the sums of the keys before the first and after the last of its terms. Where
  // it is causal chunks are marked one by one, when their keys are about to be read anyway.
  void begin() {
    fill(none_, vectors_ * pair, 0.0);
    fill(total_, vectors_ * pair, 0.0);
    fill(largest_, width_, Real(kNothing));
    fill(current_, width_, Real(kNothing));
    for (int i = 0; i < vectors_; ++i) tiny_[i] = Bits{};
    find_origin();
    if (problem_.causal) return;
    for (std::int64_t c = 0; c < chunks_; ++c) mark(c);
    fill(total_, vectors_ * pair, 0.0);
    std::int64_t last = problem_.keys;
    for (std::int64_t c = chunks_; c-- > 0;) {
      const std::int64_t start = clamp(first_term(c) + kChunk + span_);
      add_keys(total_, origin(c), start, last);
      last = start;
      copy(total_, sums_after_ + c * vectors_ * pair);
    }
  }

  void mark(std::int64_t c) {
    const std::int64_t position = clamp(c * kChunk + problem_.offset), end = clamp(first_term(c));
    for (; problem_.causal && looked_at_ < position; ++looked_at_) include(looked_at_);
    for (int i = 0; i < vectors_; ++i) {
      const std::int64_t lane = i * lanes;
      const Numbers old = at(current_ + lane), top = at(largest_ + lane);
      const Bits moves = (top > old + Real(kLead)) & (top != Real(kNothing));
      const Numbers moved = moves ? top : old;
      if (any<Real>(moves)) scale(total_, i, exponential<Real>(old - moved));
      set(current_ + lane, moved);
      set(origin_ + c * width_ + lane, moved);
      set(top_ + c * width_ + lane, top);
    }
    add_keys(total_, origin(c), summed_, end);
    summed_ = end;
    copy(total_, sums_before_ + c * vectors_ * pair);
  }

  // Where exponents are taken from first: a state's, the first key, or where all are seen the largest.
  void find_origin() {
    if (problem_.is_stream()) {
      const std::int64_t from = task_.in_state();
      for (std::int64_t c = 0; c < task_.channels.count; ++c) {
        const double max = problem_.before.max[from + c];
        current_[c] = largest_[c] = Real(max);
        const double factor = max > kNothing ? exponential<double>(all<double>(max - double(current_[c])))[0] : 0.0;
        double* const total = total_ + c / lanes * pair + c % lanes;
        total[0] = problem_.before.num[from + c] * factor;
        total[lanes] = problem_.before.den[from + c] * factor;
      }
    }
    for (std::int64_t s = 0; s < problem_.keys; ++s) {
      if (!task_.sees(s)) continue;
      Bits lacking{};
      for (int i = 0; i < vectors_; ++i) {
        const Numbers key = read<Real>(k_[s], task_.template part<Real>(i)), old = at(current_ + i * lanes);
        const Bits better = problem_.causal ? old == Real(kNothing) : key > old;
        set(current_ + i * lanes, better & (key == key) ? key : old);
        lacking |= at(current_ + i * lanes) == Real(kNothing);
      }
      if (problem_.causal && !any<Real>(lacking)) break;
    }
    for (std::int64_t c = 0; c < width_; ++c) {
      if (!problem_.causal) largest_[c] = current_[c];
      const Real size = current_[c] < 0 ? -current_[c] : current_[c];
      if (!(size <= Real(3.4028235e38))) current_[c] = 0;  // there is no key, or it is not finite
    }
  }

  void include(std::int64_t s) const {
    if (!task_.sees(s)) return;
    for (int i = 0; i < vectors_; ++i) {
      const Numbers key = read<Real>(k_[s], task_.template part<Real>(i)), old = at(largest_ + i * lanes);
      set(largest_ + i * lanes, key > old ? key : old);
    }
  }

  std::int64_t clamp(std::int64_t position) const {
    return position < 0 ? 0 : position > problem_.keys ? problem_.keys : position;
  }

  // A term that may not be formed leaves NaN.
  void add_keys(double* total, const Real* origin, std::int64_t start, std::int64_t end) const {
    for (int i = 0; i < vectors_; ++i) {
      const Part part = task_.template part<Real>(i);
      Numbers num{}, den{};
      for (std::int64_t s = start; s < end; ++s) {
        if (!task_.sees(s)) continue;
        const Terms<Real> terms(read<Real>(k_[s], part), read<Real>(v_[s], part), at(origin + i * lanes));
        num += terms.num;
        tiny_[i] |= terms.tiny;
        den += terms.bad ? all<Real>(Real(__builtin_nanf(""))) : terms.den;
      }
      add(total, i, num, den);
    }
  }

  static void add(double* total, int vector, Numbers num, Numbers den) {
    total += vector * pair;
    put_doubles(total, doubles(total) + __builtin_convertvector(num, Doubles));
    put_doubles(total + lanes, doubles(total + lanes) + __builtin_convertvector(den, Doubles));
  }

  static void scale(double* total, int vector, Numbers by) {
    const Doubles factor = __builtin_convertvector(by, Doubles);
    total += vector * pair;
    put_doubles(total, doubles(total) * factor);
    put_doubles(total + lanes, doubles(total + lanes) * factor);
  }

  void copy(const double* from, double* to) const {
    for (std::int64_t i = 0; i < vectors_ * pair; ++i) to[i] = from[i];
  }

  // The terms of a chunk's keys, and which lanes have any, or one that may not be formed.
  void form_terms(std::int64_t c) {
    for (int i = 0; i < vectors_; ++i) {
      rare_[i] = Bits{} + Bit(kChunk + span_);
      present_[i] = at(top_ + c * width_ + i * lanes) > Real(kNothing);
    }
    const std::int64_t first = first_term(c);
    for (std::int64_t x = 0; x < kChunk + span_; ++x) {
      const std::int64_t s = first + x;
      if (s + kAhead < problem_.keys && s >= 0) {
        prefetch(k_[s + kAhead]);
        prefetch(v_[s + kAhead]);
      }
      if (!task_.sees(s)) {
        for (int i = 0; i < vectors_; ++i) put_pair(terms(i) + x * pair, Numbers{}, Numbers{});
        continue;
      }
      for (int i = 0; i < vectors_; ++i) {
        const Part part = task_.template part<Real>(i);
        const Numbers key = read<Real>(k_[s], part), value = read<Real>(v_[s], part);
        const Terms<Real> terms(key, value, at(origin(c) + i * lanes));
        put_pair(this->terms(i) + x * pair, terms.num, terms.den);
        const Bits here = Bits{} + Bit(x);
        tiny_[i] |= terms.tiny;
        rare_[i] = terms.bad & (here < rare_[i]) ? here : rare_[i];
        present_[i] |= key != Real(kNothing);
        if (upstream_ != nullptr) {
          const Numbers seen = terms.den > 0 ? value : Numbers{};
          set(squares_ + i * lanes, at(squares_ + i * lanes) + seen * seen);
          const Numbers farthest = at(farthest_ + i * lanes), distance = magnitude<Real>(terms.distance);
          const Bits farther = (key != Real(kNothing)) & (distance > farthest);
          set(farthest_ + i * lanes, farther ? distance : farthest);
        }
      }
    }
  }

  // Rows lie too far apart for the processor to foresee.
  template <class T>
  void prefetch(const T* row) const {
    for (std::int64_t c = 0; c < task_.channels.count; c += 64 / sizeof(T)) __builtin_prefetch(row + c);
  }

  // Whether no key that row sees is out of range, nor a bias: it is the i-th of its tile.
  Bits is_regular(std::int64_t row, int i, int vector) const {
    const auto last = Bit(problem_.causal ? row + problem_.behind : kChunk + span_ - 1);
    const Bits regular = rare_[vector] > last;
    return is_large_[i] ? Bits{} : regular;
  }

  bool is_complete(const Output<Element>& output, std::int64_t start, std::int64_t rows) const {
    for (std::int64_t t = start; t < start + rows; ++t) {
      for (int i = 0; i < vectors_; ++i) {
        if (any<Real>(output.template missing<Real>(t, task_.template part<Real>(i)))) return false;
      }
    }
    return true;
  }

  // The weights of the terms in a range of the tile whose first row is t.
  void weigh_keys(std::int64_t t, Filled range) {
    if (problem_.kernel != nullptr) return;
    const Real later = problem_.causal ? Real(0) : Real(1);
    for (int i = 0; i < kTile; ++i) {
      Real* const to = weights_ + i;
      is_large_[i] = false;
      if (t + i >= problem_.queries) {
        for (std::int64_t m = range.begin; m < range.end; ++m) to[m * kTile] = 0;
        continue;
      }
      const Real* const row = weights(t + i, is_large_[i]);
      std::int64_t m = range.begin;
      for (; m < i && m < range.end; ++m) to[m * kTile] = 1;
      for (; m <= i + span_ && m < range.end; ++m) to[m * kTile] = row[m - i];
      for (; m < range.end; ++m) to[m * kTile] = later;
    }
  }

  // The same for the gradients of rows, the first of them t, of the tile of keys whose first is in its last cell.
  void weigh_queries(std::int64_t t, Filled range) {
    if (problem_.kernel != nullptr) return;
    const Real later = problem_.causal ? Real(0) : Real(1);
    for (std::int64_t m = range.begin; m < range.end; ++m) {
      Real* const to = weights_ + m * kTile;
      if (t + m < 0 || t + m >= problem_.queries) {
        for (int i = 0; i < kTile; ++i) to[i] = 0;
        continue;
      }
      bool ignored = false;
      const Real* const row = weights(t + m, ignored);
      for (int i = 0; i < kTile; ++i) {
        const std::int64_t cell = span_ - m + i;
        to[i] = cell < 0 ? Real(1) : cell > span_ ? later : row[cell];
      }
    }
  }

  // e^bias of the cells of row t, 0 beyond the ends of the sequence. Of a row with one that is out of range all
  // may be anything finite.
  const Real* weights(std::int64_t t, bool& is_large) {
    const std::int64_t cells = span_ + 1;
    if constexpr (sizeof(Real) == sizeof(float)) {
      const std::int64_t row = (problem_.has_bias_by_batch ? task_.channels.batch : 0) * problem_.queries + t;
      is_large = problem_.kinds[row] == kLarge;
      is_saturated_ |= problem_.kinds[row] == kSaturated;
      return problem_.weights + row * cells;
    } else {
      const RowOfBias kind = weigh_row<Real>(problem_, task_.channels.batch, t, row_);
      is_large = kind == kLarge;
      return row_;
    }
  }

  // Sums for each of `rows` rows over rows of x, and what is before and after those. weigh(row, range) prepares
  // the weights of a range of terms for the tile from that row on, write(row, vector, tile) takes its sums.
  template <class Weigh, class Write>
  [[gnu::always_inline]] void sweep(
      const Real* x, std::int64_t stride, Filled range, std::int64_t rows, const double* before,
      const double* after, bool sees_left, bool sees_right, const Real* kernel, Weigh weigh, Write write) {
    const std::int64_t tiles = (rows + kTile - 1) / kTile, width = span_ + kTile;
    for (int vector = 0; vector < vectors_; ++vector) {
      const Real* const of_vector = x + vector * stride;
      put_pair(left_ + vector * pair, narrow(before + vector * pair), narrow(before + vector * pair + lanes));
      Numbers num = narrow(after + vector * pair), den = narrow(after + vector * pair + lanes);
      std::int64_t next = sees_right ? range.end : 0;
      for (std::int64_t tile = tiles; tile-- > 0;) {
        while (next > tile * kTile + width) add_pair(of_vector + --next * pair, num, den);
        put_pair(right_ + (vector * tiles + tile) * pair, num, den);
      }
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const auto [first, last] = in_tile(range, tile * kTile);
      weigh(tile * kTile, Filled{first, last});
      for (int vector = 0; vector < vectors_; ++vector) {
        const Real* const here = x + vector * stride + tile * kTile * pair;
        Real* const left = left_ + vector * pair;
        Numbers num = at(left), den = at(left + lanes);
        add_pair(right_ + (vector * tiles + tile) * pair, num, den);
        Tile<Real> sums(num, den);
        if (kernel != nullptr) {
          const Real* const weights = kernel + (vector * padded_cells() + kTile - 1 + first) * lanes;
          accumulate<Real>(sums, here + first * pair, last - first, [&](std::int64_t m, int i) {
            return at(weights + (m - i) * lanes);
          });
        } else {
          const Real* const weights = weights_ + first * kTile;
          accumulate<Real>(sums, here + first * pair, last - first, [&](std::int64_t m, int i) {
            return weights[m * kTile + i];
          });
        }
        write(tile * kTile, vector, sums);
        if (!sees_left) continue;
        num = at(left), den = at(left + lanes);
        for (std::int64_t r = 0; r < kTile; ++r) add_pair(here + r * pair, num, den);
        put_pair(left, num, den);
      }
    }
  }

  // Calls visit(t, vector, num, den, blind, sound) for the sums of each row of chunk c, whose terms are formed:
  // whether there is no key, and whether a quotient of them is as exact as Real can be.
  template <class Visit>
  [[gnu::always_inline]] void sum_rows(std::int64_t c, Visit visit) {
    const std::int64_t start = c * kChunk, rows = rows_of(c);
    sweep(
        terms_, (kChunk + span_) * pair, filled_terms(c), rows, before(c), after(c), true, !problem_.causal,
        kernel_, [&](std::int64_t row, Filled range) { weigh_keys(start + row, range); },
        [&](std::int64_t row, int vector, const Tile<Real>& tile) {
          for (int i = 0; i < kTile && row + i < rows; ++i) {
            const Bits blind = ~present_[vector];
            const Bits sound = blind | (is_sound<Real>(tile.num[i], tile.den[i], tiny_[vector]) &
                                        is_regular(row + i, i, vector));
            visit(start + row + i, vector, tile.num[i], tile.den[i], blind, sound);
          }
        });
  }

  static Numbers narrow(const double* x) { return __builtin_convertvector(doubles(x), Numbers); }

  static Doubles doubles(const double* x) {
    Doubles y;
    std::memcpy(&y, x, sizeof y);
    return y;
  }

  static void put_doubles(double* to, Doubles x) { std::memcpy(to, &x, sizeof x); }

  // The gradients of queries and of the sums of each row.
  bool pass_to_queries() {
    const Input<Element> input(task_);
    fill(squares_, width_, Real(0));
    fill(farthest_, width_, Real(0));
    Bits unsound{};
    Numbers squares{};
    for (std::int64_t c = 0; c * kChunk < problem_.queries; ++c) {
      if (problem_.causal) mark(c);
      form_terms(c);
      sum_rows(c, [&](std::int64_t t, int vector, Numbers num, Numbers den, Bits blind, Bits sound) {
        unsound |= ~sound;
        const Numbers inverse = blind ? Numbers{} : Real(1) / den;
        const Upstream<Real> here = input.template pass<Real>(t, task_.template part<Real>(vector), num, inverse);
        squares += here.squares;
        put_pair(upstream(vector) + t * pair, here.of_num, here.of_den);
      });
      if (any<Real>(unsound)) return false;
    }
    for (int i = 0; i < vectors_; ++i) {
      const std::int64_t lane = i * lanes;
      if (chunks_ == 0) break;
      const Numbers rise = at(origin(chunks_ - 1) + lane) - at(origin(0) + lane);
      is_saturated_ |= any<Real>(rise > Limits::saturated);
      is_saturated_ |= any<Real>(at(farthest_ + lane) > Limits::saturated);
      squares += at(squares_ + lane);
    }
    return all_of<Real>(squares <= Limits::most) && (sizeof(Real) == sizeof(double) || !is_saturated_);
  }

  // The gradients of keys, values and biases.
  void pass_to_keys(std::int64_t slot) {
    const std::int64_t behind = problem_.behind, offset = problem_.offset, queries = problem_.queries;
    const Track<Element> grad_v = task_.track(problem_.grad_v);
    sum_upstream_before();
    fill(total_, vectors_ * pair, 0.0);
    std::int64_t summed = queries;  // rows from here on are in the total
    for (std::int64_t c = chunks_; c-- > 0;) {
      form_terms(c);
      pass_to_bias(c, slot);
      const std::int64_t more = c == 0 ? offset : 0;  // keys before the first query's
      const std::int64_t first = c * kChunk - problem_.ahead - more;  // row that the first key's window begins with
      const std::int64_t rows = kChunk + more, end = c * kChunk + kChunk + behind;
      if (c + 1 < chunks_) move_total(c + 1, c);
      add_rows(c, end < queries ? end : queries, summed);
      if (end < summed) summed = end;
      const std::int64_t reach = (rows + kTile - 1) / kTile * kTile + span_;
      for (std::int64_t z = 0; z < reach; ++z) {
        // Rows that the total holds are not seen twice, by a tile that reaches beyond the last key.
        copy_row(c, first + z, first + z < end, z);
      }
      const std::int64_t term = behind - more;  // of the first key
      const double* const before = problem_.causal ? none_ : upstream_before_ + c * vectors_ * pair;
      sweep(
          seen_, (key_rows_ + span_) * pair, filled(first, reach, end < queries ? end : queries), rows, before,
          total_, !problem_.causal, true, flipped_,
          [&](std::int64_t row, Filled range) { weigh_queries(first + row, range); },
          [&](std::int64_t row, int vector, const Tile<Real>& tile) {
            const Part part = task_.template part<Real>(vector);
            for (int i = 0; i < kTile && row + i < rows; ++i) {
              const std::int64_t x = term + row + i, s = first_term(c) + x;
              if (s < 0 || s >= problem_.keys) continue;
              const Numbers weight = at(terms(vector) + x * pair + lanes);
              const Numbers value = weight == 0 ? Numbers{} : read<Real>(v_[s], part);
              write_gradients(s, part, weight, value, tile.num[i], tile.den[i], grad_v);
            }
          });
    }
    for (std::int64_t s = clamp(chunks_ * kChunk + offset); s < problem_.keys; ++s) {
      for (int i = 0; i < vectors_; ++i) {
        write_gradients(s, task_.template part<Real>(i), Numbers{}, Numbers{}, Numbers{}, Numbers{}, grad_v);
      }
    }
    if (problem_.is_stream()) pass_to_state(summed);
  }

  void write_gradients(
      std::int64_t s, Part part, Numbers weight, Numbers value, Numbers of_num, Numbers of_den,
      const Track<Element>& grad_v) const {
    write<Real>(weight * of_num, grad_v[s], part);
    task_.template put_grad_k<Real>(s, part, weight * (of_num * value - of_den));
  }

  // For each chunk, the rows before those that its keys' windows begin with: where all rows see all keys.
  void sum_upstream_before() {
    if (problem_.causal) return;
    fill(total_, vectors_ * pair, 0.0);
    std::int64_t next = 0;
    for (std::int64_t c = 0; c < chunks_; ++c) {
      const std::int64_t first = c * kChunk - problem_.ahead - (c == 0 ? problem_.offset : 0);
      add_rows(c, next, first < problem_.queries ? first : problem_.queries);
      if (first > next) next = first;
      copy(total_, upstream_before_ + c * vectors_ * pair);
    }
  }

  Numbers factor(std::int64_t to, std::int64_t from, int vector) const {
    return exponential<Real>(at(origin(to) + vector * lanes) - at(origin(from) + vector * lanes));
  }

  // The total from one chunk's origin to an earlier one's.
  void move_total(std::int64_t from, std::int64_t to) {
    for (int i = 0; i < vectors_; ++i) scale(total_, i, factor(to, from, i));
  }

  // Adds rows to the total, whose origin is that of chunk c.
  void add_rows(std::int64_t c, std::int64_t start, std::int64_t end) {
    for (std::int64_t t = start; t < end;) {
      const std::int64_t chunk = t / kChunk, next = (chunk + 1) * kChunk;
      const std::int64_t stop = next < end ? next : end;
      for (int i = 0; i < vectors_; ++i) {
        Numbers num{}, den{};
        for (std::int64_t row = t; row < stop; ++row) add_pair(upstream(i) + row * pair, num, den);
        const Numbers scaled = factor(c, chunk, i);
        add(total_, i, num * scaled, den * scaled);
      }
      t = stop;
    }
  }

  void copy_row(std::int64_t c, std::int64_t t, bool is_wanted, std::int64_t to) const {
    const bool is_there = is_wanted && t >= 0 && t < problem_.queries;
    for (int i = 0; i < vectors_; ++i) {
      if (!is_there) {
        put_pair(seen(i) + to * pair, Numbers{}, Numbers{});
        continue;
      }
      const Real* const from = upstream(i) + t * pair;
      const Numbers scaled = problem_.causal && t / kChunk != c ? factor(c, t / kChunk, i) : all<Real>(1);
      put_pair(seen(i) + to * pair, at(from) * scaled, at(from + lanes) * scaled);
    }
  }

  void pass_to_state(std::int64_t summed) {
    add_rows(0, 0, summed);
    const std::int64_t to = task_.in_state();
    for (std::int64_t c = 0; c < task_.channels.count; ++c) {
      const double max = problem_.before.max[to + c];
      const double factor =
          max > kNothing && chunks_ > 0 ? exponential<double>(all<double>(max - double(origin(0)[c])))[0] : 0.0;
      const double* const total = total_ + c / lanes * pair + c % lanes;
      problem_.grad_before.num[to + c] = total[0] * factor;
      problem_.grad_before.den[to + c] = -total[lanes] * factor;
    }
  }

  void pass_to_bias(std::int64_t c, std::int64_t slot) {
    if (c * kChunk >= problem_.queries) return;
    if (problem_.kernel != nullptr) {
      for (int i = 0; i < vectors_; ++i) pass_to_kernel(c, i, slot);
    } else {
      for (std::int64_t row = 0; row < rows_of(c); row += kTile) pass_to_places(c, row, slot);
    }
  }

  // The gradients of the biases of some distances at a time, which stay in registers.
  void pass_to_kernel(std::int64_t c, int vector, std::int64_t slot) {
    constexpr int kCells = kTile;
    const Part part = task_.template part<Real>(vector);
    const std::int64_t rows = rows_of(c);
    const Real* const of_rows = upstream(vector) + c * kChunk * pair;
    const Real* const weights = kernel_ + (vector * padded_cells() + kTile - 1) * lanes;
    double* const grad = problem_.grad_kernel +
                         slot * problem_.cells() * problem_.channels + task_.channels.first + part.first;
    for (std::int64_t cell = 0; cell <= span_; cell += kCells) {
      Numbers sums[kCells] = {};
      const Real* const of_keys = terms(vector) + cell * pair;
      const std::int64_t count = cell + kCells <= span_ + 1 ? kCells : span_ + 1 - cell;
      if (count == kCells) {
        add_products<kCells>(of_rows, of_keys, rows, sums);
      } else {
        for (std::int64_t j = 0; j < count; ++j) add_products<1>(of_rows, of_keys + j * pair, rows, sums + j);
      }
      for (std::int64_t j = 0; j < count; ++j) {
        const Numbers sum = sums[j] * at(weights + (cell + j) * lanes);
        for (int i = 0; i < part.count; ++i) grad[(cell + j) * problem_.channels + i] += double(sum[i]);
      }
    }
  }

  // The gradients of the biases of a tile of rows: sums over channels.
  void pass_to_places(std::int64_t c, std::int64_t row, std::int64_t slot) {
    constexpr int kKeys = 2;
    const std::int64_t start = c * kChunk + row, cells = span_ + 1;
    const Filled range = in_tile(filled_terms(c), row);
    weigh_keys(start, range);
    const std::int64_t rows = problem_.queries - start < kTile ? problem_.queries - start : kTile;
    float* const grad = problem_.grad_bias + (slot * problem_.queries + start) * cells;
    std::int64_t at_row[kTile];
    for (int i = 0; i < kTile; ++i) {  // rows that do not exist repeat the last, and are dropped
      at_row[i] = (start + (i < rows ? i : rows - 1)) * pair;
    }
    for (std::int64_t m = range.begin; m < range.end; m += kKeys) {
      Numbers sums[kKeys][kTile] = {};
      const std::int64_t second = m + 1 < range.end ? pair : 0;
      for (int vector = 0; vector < vectors_; ++vector) {
        const Real* const of_keys = terms(vector) + (row + m) * pair;
        const Real* const of_rows = upstream(vector);
        const Numbers x0 = at(of_keys), y0 = at(of_keys + lanes);
        const Numbers x1 = at(of_keys + second), y1 = at(of_keys + second + lanes);
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) {
          const Numbers of_num = at(of_rows + at_row[i]), of_den = at(of_rows + at_row[i] + lanes);
          sums[0][i] += of_num * x0 - of_den * y0;
          sums[1][i] += of_num * x1 - of_den * y1;
        }
      }
      Real flows[kKeys * kTile];
      for (int k = 0; k < kKeys * kTile; k += lanes) set(flows + k, sums_of<Real>(&sums[0][0] + k));
      for (int k = 0; k < kKeys && m + k < range.end; ++k) {
        for (int i = 0; i < rows; ++i) {
          const std::int64_t cell = m + k - i;
          if (cell < 0 || cell >= cells) continue;
          grad[i * cells + cell] += float(flows[k * kTile + i] * weights_[(m + k) * kTile + i]);
        }
      }
    }
  }

  const Task<Element> task_;
  const Window& problem_;
  const Track<const Element> k_, v_;
  const int vectors_;
  const std::int64_t width_;     // channels, rounded up to whole vectors; two of them make a row of sums
  const std::int64_t span_;      // cells of the window but one
  const std::int64_t chunks_;
  const std::int64_t key_rows_;  // the most keys that the way back takes with a chunk
  Real *origin_, *top_;          // by chunk; the largest key before it, or of all
  double *sums_before_, *sums_after_, *none_, *total_;
  Real *current_, *largest_;     // while chunks are marked: the origin, and the largest key so far
  std::int64_t looked_at_ = 0, summed_ = 0;
  Real *terms_, *right_, *left_, *squares_, *farthest_, *kernel_, *weights_, *row_;
  Real *flipped_ = nullptr, *upstream_ = nullptr, *seen_ = nullptr;
  double* upstream_before_ = nullptr;
  Bits *rare_, *present_, *tiny_;
  bool is_large_[kTile] = {};
  bool has_small_bias_ = true;
  bool is_saturated_ = false;
  const Buffer memory_;
};

}  // namespace
}  // namespace AFT_LEVEL
}  // namespace aft
