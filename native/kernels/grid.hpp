// AFT-conv over a grid, for some channels of one grid, a vector of channels at a time.
//
// As over a sequence, but that windows have several rows of keys. The cells of a row are queries of a few tiles.
// For each tile the keys of a row are those under the kernel, whose weights slide along, and those to the left
// and right of them, which are summed once. Whole rows above and below the kernel are summed once as well.
#pragma once

#include "window_kernel.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

template <class Element, class Real>
class Grid {
  using Numbers = Vector<Real>;
  using Bits = typename Vectors<Real>::Bits;
  using Bit = typename Vectors<Real>::Bit;
  using Limits = Range<Real>;
  static constexpr int lanes = kLanes<Real>;
  static constexpr std::int64_t pair = 2 * lanes;

  // The rows of the grid that a cell sees beside its own.
  enum Rows { kAll, kEarlier, kLater };

  // A kernel as it lies over one operand: terms of keys, or on the way back of queries.
  struct Side {
    std::int64_t row = 0, column = 0;  // of the anchor
    Real* terms = nullptr;             // [rows, padded width] of pairs, zeros beside the grid
    Real* weights = nullptr;           // [kernel rows, padded kernel width]
    Rows sees = kAll;
    std::int64_t first = 0;            // row of the grid that sums are wanted from
    Numbers num{}, den{};              // what all cells see beside the grid
  };

 public:
  Grid(const Window& problem, const Channels& at, bool is_backward)
      : task_{problem, at},
        problem_(problem),
        k_(task_.template track<const Element>(problem.k)),
        v_(task_.template track<const Element>(problem.v)),
        height_((problem.keys + problem.width - 1) / problem.width),
        tiles_((problem.width + kTile - 1) / kTile),
        padded_(tiles_ * kTile + problem.kernel_width - 1),
        padded_kernel_(problem.kernel_width + 2 * (kTile - 1)),
        memory_(lay_out(nullptr, is_backward)) {
    lay_out(memory_.data(), is_backward);
    const bool causal = problem.causal;
    keys_.row = problem.anchor_row;
    keys_.column = problem.anchor_column;
    keys_.sees = causal ? kEarlier : kAll;
    keys_.first = problem.offset / problem.width;
    queries_.row = problem.kernel_height - 1 - problem.anchor_row;
    queries_.column = problem.kernel_width - 1 - problem.anchor_column;
    queries_.sees = causal ? kLater : kAll;
    is_usable_ = has_small_kernel();
  }

  bool is_usable() const { return is_usable_; }

  bool forward(bool is_written) {
    const Output<Element> output(task_);
    Bits unsound{};
    for (int vector = 0; vector < task_.template vectors<Real>(); ++vector) {
      begin(vector);
      sweep(keys_, [&](std::int64_t position, int i, const Tile<Real>& tile) {
        const std::int64_t t = position - problem_.offset;
        if (t < 0) return;
        const Bits sound = is_sound_at(position, tile.num[i], tile.den[i]);
        unsound |= output.template put_mean<Real>(t, part_, tile.num[i], tile.den[i], blind_, sound, is_written);
      });
    }
    return !any<Real>(unsound);
  }

  // False, and no gradient of the kernel, where another pass has to do it.
  bool backward(std::int64_t slot) {
    const int vectors = task_.template vectors<Real>();
    for (int vector = 0; vector < vectors; ++vector) {
      begin(vector);
      if (!pass_to_queries()) return false;
    }
    for (int vector = 0; vector < vectors; ++vector) {
      if (vectors > 1) {  // else all is still there, as it is in single precision
        begin(vector);
        pass_to_queries();
      }
      pass_to_keys();
      pass_to_kernel(slot);
      if (problem_.is_stream()) pass_to_state();
    }
    return true;
  }

 private:
  std::int64_t lay_out(void* data, bool is_backward) {
    Arena arena(data);
    const std::int64_t cells = height_ * padded_, kernel = problem_.kernel_height * padded_kernel_ * lanes;
    keys_.terms = arena.take<Real>(cells * pair);
    keys_.weights = arena.take<Real>(kernel);
    if (is_backward) {
      queries_.terms = arena.take<Real>(cells * pair);
      queries_.weights = arena.take<Real>(kernel);
    }
    left_ = arena.take<Real>(height_ * tiles_ * pair);
    right_ = arena.take<Real>(height_ * tiles_ * pair);
    above_ = arena.take<Real>((height_ + 1) * pair);
    below_ = arena.take<Real>((height_ + 1) * pair);
    return arena.size();
  }

  Numbers kernel(std::int64_t cell) const {
    return read<Real>(problem_.kernel + cell * problem_.channels + task_.channels.first, part_);
  }

  bool has_small_kernel() {
    Bits large{};
    for (int vector = 0; vector < task_.template vectors<Real>(); ++vector) {
      part_ = task_.template part<Real>(vector);
      for (std::int64_t cell = 0; cell < problem_.cells(); ++cell) {
        const Numbers bias = kernel(cell), size = magnitude<Real>(bias);
        const Bits absent = bias == Real(kNothing);
        large |= ~(absent | (size <= Limits::bias));
        is_saturated_ |= any<Real>(~absent & (size > Limits::saturated_bias));
      }
    }
    return !any<Real>(large);
  }

  // Turns to a vector of channels: its weights, its origin and its keys' terms.
  void begin(int vector) {
    part_ = task_.template part<Real>(vector);
    weigh();
    find_origin();
    form_terms();
  }

  void weigh() {
    const std::int64_t width = problem_.kernel_width;
    for (std::int64_t row = 0; row < problem_.kernel_height; ++row) {
      for (std::int64_t column = 0; column < padded_kernel_; ++column) {
        const std::int64_t cell = column - (kTile - 1);
        const bool is_later = row == keys_.row && cell > keys_.column;
        Numbers weight = all<Real>(1);
        if (cell >= 0 && cell < width) weight = exponential<Real>(kernel(row * width + cell));
        if (problem_.causal && is_later) weight = Numbers{};
        set(keys_.weights + (row * padded_kernel_ + column) * lanes, weight);
        if (queries_.weights == nullptr) continue;
        const std::int64_t turned = (problem_.kernel_height - row) * padded_kernel_ - 1 - column;
        set(queries_.weights + turned * lanes, weight);
      }
    }
  }

  // A state's, or the first key where that is all that the first query sees, else the largest.
  void find_origin() {
    origin_ = all<Real>(Real(kNothing));
    const std::int64_t state = task_.in_state() + part_.first;
    for (int i = 0; problem_.is_stream() && i < part_.count; ++i) origin_[i] = Real(problem_.before.max[state + i]);
    blind_ = origin_ == Real(kNothing);
    for (std::int64_t s = 0; s < problem_.keys; ++s) {
      if (!task_.sees(s)) continue;
      const Numbers key = read<Real>(k_[s], part_);
      const Bits better = problem_.causal ? origin_ == Real(kNothing) : key > origin_;
      origin_ = better & (key == key) ? key : origin_;
      if (problem_.causal && !any<Real>(origin_ == Real(kNothing))) break;
    }
    origin_ = magnitude<Real>(origin_) <= Real(3.4028235e38f) ? origin_ : Numbers{};
    for (int i = 0; problem_.is_stream() && i < part_.count; ++i) {
      keys_.num[i] = Real(problem_.before.num[state + i] * of_state(i));
      keys_.den[i] = Real(problem_.before.den[state + i] * of_state(i));
    }
  }

  // e^(the state's maximum - the origin).
  double of_state(int lane) const {
    const double max = problem_.before.max[task_.in_state() + part_.first + lane];
    return max > kNothing ? exponential<double>(all<double>(max - double(origin_[lane])))[0] : 0.0;
  }

  void form_terms() {
    ::aft::AFT_LEVEL::fill(keys_.terms, height_ * padded_ * pair, Real(0));
    rare_ = Bits{} + Bit(problem_.keys);
    tiny_ = Bits{};
    squares_ = Numbers{};
    Numbers farthest{};
    for (std::int64_t s = 0; s < problem_.keys; ++s) {
      if (!task_.sees(s)) continue;
      const Numbers key = read<Real>(k_[s], part_), value = read<Real>(v_[s], part_);
      const Terms<Real> terms(key, value, origin_);
      set(cell_of(keys_, s), terms.num);
      set(cell_of(keys_, s) + lanes, terms.den);
      const Bits here = Bits{} + Bit(s);
      tiny_ |= terms.tiny;
      rare_ = terms.bad & (here < rare_) ? here : rare_;
      blind_ &= key == Real(kNothing);
      const Numbers seen = terms.den > 0 ? value : Numbers{};
      squares_ += seen * seen;
      const Numbers distance = magnitude<Real>(terms.distance);
      farthest = (key != Real(kNothing)) & (distance > farthest) ? distance : farthest;
    }
    is_far_ = any<Real>(farthest > Limits::saturated);
  }

  Real* cell_of(const Side& side, std::int64_t position) const {
    const std::int64_t row = position / problem_.width, column = position % problem_.width;
    return side.terms + (row * padded_ + side.column + column) * pair;
  }

  Bits is_sound_at(std::int64_t position, Numbers num, Numbers den) const {
    const Bit last = Bit(problem_.causal ? position : problem_.keys - 1);
    return blind_ | (is_sound<Real>(num, den, tiny_) & (rare_ > last));
  }

  // The sums of each cell over the terms of a side.
  template <class Write>
  [[gnu::always_inline]] void sweep(const Side& side, Write write) {
    sum_strips(side);
    for (std::int64_t y = side.first; y < height_; ++y) {
      const std::int64_t first = y - side.row, last = first + problem_.kernel_height;
      const std::int64_t least = side.sees == kLater ? y : 0, most = side.sees == kEarlier ? y + 1 : height_;
      const std::int64_t begin = first > least ? first : least, end = last < most ? last : most;
      for (std::int64_t tile = 0; tile < tiles_; ++tile) {
        Numbers num = side.num, den = side.den;
        if (side.sees != kLater) add_pair(above_ + (begin < 0 ? 0 : begin) * pair, num, den);
        if (side.sees != kEarlier) add_pair(below_ + end * pair, num, den);
        for (std::int64_t row = begin; row < end; ++row) {
          const std::int64_t at_row = (row * tiles_ + tile) * pair;
          if (row != y || side.sees != kLater) add_pair(left_ + at_row, num, den);
          if (row != y || side.sees != kEarlier) add_pair(right_ + at_row, num, den);
        }
        Tile<Real> sums(num, den);
        // Of the terms under the kernel, those that are not beside the grid.
        const std::int64_t left = side.column - tile * kTile, right = left + problem_.width;
        const std::int64_t skipped = left > 0 ? left : 0, seen = problem_.kernel_width + kTile - 1;
        const std::int64_t stop = right < seen ? right : seen;
        for (std::int64_t row = begin; row < end; ++row) {
          const Real* const weights = side.weights + ((row - first) * padded_kernel_ + skipped + kTile - 1) * lanes;
          const Real* const terms = side.terms + (row * padded_ + tile * kTile + skipped) * pair;
          accumulate<Real>(sums, terms, stop - skipped, [&](std::int64_t m, int i) {
            return at(weights + (m - i) * lanes);
          });
        }
        for (int i = 0; i < kTile && tile * kTile + i < problem_.width; ++i) {
          const std::int64_t position = y * problem_.width + tile * kTile + i;
          if (position < problem_.keys) write(position, i, sums);
        }
      }
    }
  }

  // What lies beside each tile in a row, and the sums of whole rows.
  void sum_strips(const Side& side) {
    const std::int64_t seen = problem_.kernel_width + kTile - 1;
    for (std::int64_t y = 0; y < height_; ++y) {
      const Real* const row = side.terms + y * padded_ * pair;
      Numbers num{}, den{};
      for (std::int64_t tile = 0; tile < tiles_; ++tile) {
        put_pair(left_ + (y * tiles_ + tile) * pair, num, den);
        for (int i = 0; i < kTile; ++i) add_pair(row + (tile * kTile + i) * pair, num, den);
      }
      Numbers of_num{}, of_den{};
      for (std::int64_t tile = tiles_; tile-- > 0;) {
        put_pair(right_ + (y * tiles_ + tile) * pair, of_num, of_den);
        for (int i = 0; tile > 0 && i < kTile; ++i) {
          add_pair(row + ((tile - 1) * kTile + seen + i) * pair, of_num, of_den);
        }
      }
      for (std::int64_t x = tiles_ * kTile; x < padded_; ++x) add_pair(row + x * pair, num, den);
      put_pair(above_ + (y + 1) * pair, num, den);  // for now of this row alone
      put_pair(below_ + y * pair, num, den);
    }
    put_pair(above_, Numbers{}, Numbers{});
    put_pair(below_ + height_ * pair, Numbers{}, Numbers{});
    for (std::int64_t y = 0; y < height_; ++y) join(above_ + y * pair, above_ + (y + 1) * pair);
    for (std::int64_t y = height_; y-- > 0;) join(below_ + (y + 1) * pair, below_ + y * pair);
  }

  static void join(const Real* from, Real* to) {
    Numbers num = at(to), den = at(to + lanes);
    add_pair(from, num, den);
    put_pair(to, num, den);
  }

  bool pass_to_queries() {
    const Input<Element> input(task_);
    ::aft::AFT_LEVEL::fill(queries_.terms, height_ * padded_ * pair, Real(0));
    Bits unsound{};
    Numbers squares = squares_;
    sweep(keys_, [&](std::int64_t position, int i, const Tile<Real>& tile) {
      const std::int64_t t = position - problem_.offset;
      if (t < 0) return;
      unsound |= ~is_sound_at(position, tile.num[i], tile.den[i]);
      const Numbers inverse = blind_ ? Numbers{} : Real(1) / tile.den[i];
      const Upstream<Real> here = input.template pass<Real>(t, part_, tile.num[i], inverse);
      squares += here.squares;
      put_pair(cell_of(queries_, position), here.of_num, here.of_den);
    });
    const bool is_saturated = is_saturated_ || is_far_;
    return !any<Real>(unsound) && all_of<Real>(squares <= Limits::most) &&
           (sizeof(Real) == sizeof(double) || !is_saturated);
  }

  void pass_to_keys() {
    const Track<Element> grad_v = task_.track(problem_.grad_v);
    sweep(queries_, [&](std::int64_t s, int i, const Tile<Real>& tile) {
      const Numbers weight = at(cell_of(keys_, s) + lanes);
      const Numbers value = weight == 0 ? Numbers{} : read<Real>(v_[s], part_);
      write<Real>(weight * tile.num[i], grad_v[s], part_);
      task_.template put_grad_k<Real>(s, part_, weight * (tile.num[i] * value - tile.den[i]));
    });
  }

  // All queries see the keys of the state.
  void pass_to_state() const {
    const std::int64_t state = task_.in_state() + part_.first;
    for (int i = 0; i < part_.count; ++i) {
      double num = 0, den = 0;
      for (std::int64_t cell = 0; cell < height_ * padded_; ++cell) {
        num += double(queries_.terms[cell * pair + i]);
        den += double(queries_.terms[cell * pair + lanes + i]);
      }
      problem_.grad_before.num[state + i] = num * of_state(i);
      problem_.grad_before.den[state + i] = -den * of_state(i);
    }
  }

  // Some cells of a row of the kernel at a time, whose gradients stay in registers.
  void pass_to_kernel(std::int64_t slot) {
    for (std::int64_t row = 0; row < problem_.kernel_height; ++row) {
      if (problem_.causal && row > keys_.row) break;
      std::int64_t column = 0;
      for (; column + kTile <= problem_.kernel_width; column += kTile) pass_to_cells<kTile>(row, column, slot);
      for (; column + 2 <= problem_.kernel_width; column += 2) pass_to_cells<2>(row, column, slot);
      for (; column < problem_.kernel_width; ++column) pass_to_cells<1>(row, column, slot);
    }
  }

  template <int kCells>
  void pass_to_cells(std::int64_t row, std::int64_t column, std::int64_t slot) {
    // Rows of the grid whose products are summed in Real.
    const std::int64_t block = problem_.width < 256 ? 256 / problem_.width : 1;
    const std::int64_t shift = row - keys_.row;
    const std::int64_t first = shift < 0 ? -shift : 0;
    const std::int64_t last = shift > 0 ? height_ - shift : height_;
    double* const grad = problem_.grad_kernel + task_.channels.first + part_.first +
                         (slot * problem_.cells() + row * problem_.kernel_width + column) * problem_.channels;
    for (std::int64_t y = first; y < last; y += block) {
      Numbers sums[kCells] = {};
      for (std::int64_t query = y; query < y + block && query < last; ++query) {
        const Real* const upstream = queries_.terms + (query * padded_ + queries_.column) * pair;
        const Real* const terms = keys_.terms + ((query + shift) * padded_ + column) * pair;
        add_products<kCells>(upstream, terms, problem_.width, sums);
      }
      for (int j = 0; j < kCells; ++j) {
        const std::int64_t cell = row * padded_kernel_ + column + j + kTile - 1;
        const Numbers sum = sums[j] * at(keys_.weights + cell * lanes);
        for (int i = 0; i < part_.count; ++i) grad[j * problem_.channels + i] += double(sum[i]);
      }
    }
  }

  const Task<Element> task_;
  const Window& problem_;
  const Track<const Element> k_, v_;
  const std::int64_t height_, tiles_, padded_, padded_kernel_;
  Side keys_, queries_;
  Real *left_, *right_, *above_, *below_;
  Part part_{};
  Numbers origin_{}, squares_{};
  Bits rare_{}, blind_{}, tiny_{};
  bool is_usable_ = false, is_saturated_ = false, is_far_ = false;
  const Buffer memory_;
};

}  // namespace
}  // namespace AFT_LEVEL
}  // namespace aft
