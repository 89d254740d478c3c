// AFT-local and AFT-conv, element by element in double, for exponents of any size.
//
// Every row has an origin of its own, the key and the bias of a largest exponent. They stay apart: in their sum
// the larger would swallow the smaller. Keys before the window, and those after it, are sums with the largest
// key, and no bias.
#pragma once

#include "window_kernel.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

template <class Element>
class Exact {
  using Numbers = Vector<double>;
  using Bits = Vectors<double>::Bits;
  static constexpr int lanes = kLanes<double>;

  // Sums relative to e^(key + bias); of nothing where the key is -inf.
  struct Sums {
    Numbers num{}, den{}, key = all<double>(kNothing), bias{};

    // Makes room for an exponent: afterwards it is at most the origin's.
    void include(Numbers to_key, Numbers to_bias) {
      const Numbers above = (to_key - finite(key)) + (to_bias - bias);
      const Bits moves = (to_key > kNothing) & ((key == kNothing) | (above > 0));
      if (!any<double>(moves)) return;
      const Numbers factor = key == kNothing ? Numbers{} : exponential<double>(moves ? -above : Numbers{});
      num *= factor;
      den *= factor;
      key = moves ? to_key : key;
      bias = moves ? to_bias : bias;
    }

    // e^(key + bias) of this origin.
    Numbers relative(Numbers of_key, Numbers of_bias) const {
      const Numbers x = (of_key - finite(key)) + (of_bias - bias);
      return exponential<double>(x > 700.0 ? all<double>(700.0) : x);
    }

    void add(Numbers of_num, Numbers of_den, Numbers of_key, Numbers of_bias) {
      include(of_key, of_bias);
      const Numbers weight = of_key == kNothing ? Numbers{} : relative(of_key, of_bias);
      num += weight == 0 ? Numbers{} : weight * of_num;
      den += weight == 0 ? Numbers{} : weight * of_den;
    }
  };

 public:
  Exact(const Window& problem, const Channels& at)
      : task_{problem, at},
        problem_(problem),
        k_(task_.template track<const Element>(problem.k)),
        v_(task_.template track<const Element>(problem.v)),
        ahead_(problem.causal ? 0 : problem.ahead) {}

  void forward(bool is_written) {
    const Output<Element> output(task_);
    for (int i = 0; i < task_.template vectors<double>(); ++i) {
      part_ = task_.template part<double>(i);
      RowSums rows(*this);
      for (std::int64_t t = 0; t < problem_.queries; ++t) {
        if (!is_written) {
          output.template put<double>(t, part_, mean(rows.at(t)));
          continue;
        }
        const Bits missing = output.template missing<double>(t, part_);
        if (any<double>(missing)) output.template replace<double>(t, part_, mean(rows.at(t)), missing);
      }
    }
  }

  void backward(std::int64_t slot) {
    for (int i = 0; i < task_.template vectors<double>(); ++i) {
      part_ = task_.template part<double>(i);
      back(slot);
    }
  }

 private:
  static Numbers finite(Numbers x) { return x == kNothing ? Numbers{} : x; }

  static Numbers mean(const Sums& sums) {
    return sums.den == 0 ? Numbers{} : sums.num / sums.den;
  }

  Numbers key(std::int64_t s) const { return read<double>(k_[s], part_); }
  Numbers value(std::int64_t s) const { return read<double>(v_[s], part_); }

  std::int64_t clamp(std::int64_t position) const {
    return position < 0 ? 0 : position > problem_.keys ? problem_.keys : position;
  }
  std::int64_t first_key(std::int64_t t) const { return clamp(t + problem_.offset - problem_.behind); }
  std::int64_t end_of_keys(std::int64_t t) const { return clamp(t + problem_.offset + ahead_ + 1); }

  // The cell of the kernel that lies on key s, -1 where none does.
  std::int64_t cell(std::int64_t t, std::int64_t s) const {
    if (!problem_.is_grid()) return s - t - problem_.offset + problem_.behind;
    const std::int64_t query = t + problem_.offset;
    const std::int64_t row = s / problem_.width - query / problem_.width + problem_.anchor_row;
    const std::int64_t column = s % problem_.width - query % problem_.width + problem_.anchor_column;
    if (row < 0 || row >= problem_.kernel_height || column < 0 || column >= problem_.kernel_width) return -1;
    return row * problem_.kernel_width + column;
  }

  Numbers bias(std::int64_t t, std::int64_t s) const {
    if (problem_.kernel == nullptr) return all<double>(task_.bias(t, s));
    const std::int64_t at = cell(t, s);
    if (at < 0) return Numbers{};
    return read<double>(problem_.kernel + at * problem_.channels + task_.channels.first, part_);
  }

  // The key and the bias of a pair; the key is -inf where either is.
  struct Exponent {
    Numbers key, bias;
  };

  Exponent exponent(std::int64_t t, std::int64_t s) const {
    Numbers k = key(s), w = bias(t, s);
    const Bits absent = (k == kNothing) | (w == kNothing);
    return {absent ? all<double>(kNothing) : k, absent ? Numbers{} : w};
  }

  void add_key(Sums& sums, std::int64_t s) const {
    if (task_.sees(s)) sums.add(value(s), all<double>(1), key(s), Numbers{});
  }

  // The sums of each row, asked for in order.
  class RowSums {
   public:
    explicit RowSums(const Exact& exact)
        : exact_(exact),
          is_causal_(exact.problem_.causal),
          memory_(is_causal_ ? 64 : (exact.problem_.keys + 1) * std::int64_t(sizeof(Sums))),
          after_(static_cast<Sums*>(memory_.data())) {
      if (exact.problem_.is_stream()) begin();
      if (is_causal_) return;
      after_[exact.problem_.keys] = Sums{};
      for (std::int64_t s = exact.problem_.keys; s-- > 0;) {
        after_[s] = after_[s + 1];
        exact.add_key(after_[s], s);
      }
    }

    Sums at(std::int64_t t) {
      const std::int64_t first = exact_.first_key(t), end = exact_.end_of_keys(t);
      for (; next_ < first; ++next_) exact_.add_key(before_, next_);
      Sums sums = before_;
      if (!is_causal_) join(sums, after_[end]);
      Sums origin = sums;
      for (int pass = 0; pass < 2; ++pass) {  // the second finds what rounding hid from the first
        for (std::int64_t s = first; s < end; ++s) {
          if (!exact_.task_.sees(s)) continue;
          const Exponent x = exact_.exponent(t, s);
          origin.include(x.key, x.bias);
        }
      }
      sums.include(origin.key, origin.bias);
      for (std::int64_t s = first; s < end; ++s) {
        if (!exact_.task_.sees(s)) continue;
        const Exponent x = exact_.exponent(t, s);
        sums.add(exact_.value(s), all<double>(1), x.key, x.bias);
      }
      return sums;
    }

   private:
    static void join(Sums& sums, const Sums& others) { sums.add(others.num, others.den, others.key, others.bias); }

    void begin() {
      const State& state = exact_.problem_.before;
      const std::int64_t from = exact_.task_.in_state() + exact_.part_.first;
      for (int i = 0; i < exact_.part_.count; ++i) {
        before_.num[i] = state.num[from + i];
        before_.den[i] = state.den[from + i];
        before_.key[i] = state.max[from + i];
      }
    }

    const Exact& exact_;
    const bool is_causal_;
    const Buffer memory_;
    Sums* const after_;  // the keys from each on
    Sums before_;
    std::int64_t next_ = 0;
  };

  // A row on the way back: the gradients of its num and minus den, relative to its origin's inverse.
  struct Row {
    Numbers of_num, of_den, key, bias;
  };

  // Sums of rows' gradients, relative to e^-(key + bias) of the row of them where that is largest.
  struct Inflow : Sums {
    void add_row(const Row& row) {
      const Numbers of_key = row.key == kNothing ? all<double>(kNothing) : -row.key;
      this->add(row.of_num, row.of_den, of_key, -row.bias);
    }

    void pass_to(Numbers of_key, Numbers& of_num, Numbers& of_den) const {
      const Bits counts = (this->key > kNothing) & (of_key > kNothing);
      const Numbers exponent = (of_key + finite(this->key)) + this->bias;
      const Numbers weight =
          counts ? exponential<double>(exponent > 700.0 ? all<double>(700.0) : exponent) : Numbers{};
      of_num += weight * this->num;
      of_den += weight * this->den;
    }
  };

  void back(std::int64_t slot) {
    const std::int64_t queries = problem_.queries, keys = problem_.keys;
    const std::int64_t windows = problem_.causal ? 0 : queries + 1;
    const Buffer memory(queries * std::int64_t(sizeof(Row)) + windows * std::int64_t(sizeof(Inflow)) + 64);
    Row* const rows = static_cast<Row*>(memory.data());
    Inflow* const early = problem_.causal ? nullptr : reinterpret_cast<Inflow*>(rows + queries);
    find_rows(rows);
    find_early(early, rows);
    const Track<Element> grad_v = task_.track(problem_.grad_v);
    Inflow later;
    std::int64_t summed = queries;
    for (std::int64_t s = keys; s-- > 0;) {
      // The rows whose windows key s is in, but for the cells that a kernel lacks.
      const std::int64_t first = clamp_row(s - problem_.offset - ahead_);
      const std::int64_t end = clamp_row(s - problem_.offset + problem_.behind + 1);
      for (; summed > end; --summed) later.add_row(rows[summed - 1]);
      Numbers of_num{}, of_den{}, of_key{}, of_value{};
      if (task_.sees(s)) {
        const Numbers k = key(s);
        later.pass_to(k, of_num, of_den);
        if (early != nullptr) early[first].pass_to(k, of_num, of_den);
        const Numbers v = value(s);
        of_value = of_num;
        of_key = difference(of_num, of_den, v);
        for (std::int64_t t = first; t < end; ++t) {
          const Row& row = rows[t];
          const Exponent x = exponent(t, s);
          const Bits counts = (x.key > kNothing) & (row.key > kNothing);
          const Numbers distance = (x.key - finite(row.key)) + (x.bias - row.bias);
          const Numbers weight =
              counts ? exponential<double>(distance > 700.0 ? all<double>(700.0) : distance) : Numbers{};
          of_value += weight * row.of_num;
          const Numbers flow = difference(weight * row.of_num, weight * row.of_den, weight == 0 ? Numbers{} : v);
          of_key += flow;
          pass_to_bias(t, s, flow, slot);
        }
      }
      task_.template put_grad_k<double>(s, part_, of_key);
      write<double>(of_value, grad_v[s], part_);
    }
    if (problem_.is_stream()) {
      for (; summed > 0; --summed) later.add_row(rows[summed - 1]);
      pass_to_state(later);
    }
  }

  // Not 0 times NaN: what has no weight may be anything.
  static Numbers difference(Numbers of_num, Numbers of_den, Numbers v) {
    return (of_num == 0 ? Numbers{} : of_num * v) - of_den;
  }

  std::int64_t clamp_row(std::int64_t t) const { return t < 0 ? 0 : t > problem_.queries ? problem_.queries : t; }

  void find_rows(Row* rows) const {
    const Input<Element> input(task_);
    RowSums sums_of(*this);
    for (std::int64_t t = 0; t < problem_.queries; ++t) {
      const Sums sums = sums_of.at(t);
      const Numbers inverse = sums.den == 0 ? Numbers{} : 1.0 / sums.den;
      const Upstream<double> here = input.template pass<double>(t, part_, sums.num, inverse);
      rows[t] = {here.of_num, here.of_den, sums.key, sums.bias};
    }
  }

  // Entry t: the rows before t, all of which see the keys after their windows. None in a causal problem.
  void find_early(Inflow* early, const Row* rows) const {
    if (early == nullptr) return;
    early[0] = Inflow{};
    for (std::int64_t t = 0; t < problem_.queries; ++t) {
      early[t + 1] = early[t];
      early[t + 1].add_row(rows[t]);
    }
  }

  void pass_to_bias(std::int64_t t, std::int64_t s, Numbers flow, std::int64_t slot) const {
    if (problem_.kernel != nullptr) {
      const std::int64_t at = cell(t, s);
      if (at < 0) return;
      double* const grad = problem_.grad_kernel + (slot * problem_.cells() + at) * problem_.channels +
                           task_.channels.first + part_.first;
      for (int i = 0; i < part_.count; ++i) grad[i] += flow[i];
    } else {
      double sum = 0;
      for (int i = 0; i < part_.count; ++i) sum += flow[i];
      const std::int64_t at = s - t - problem_.offset + problem_.behind;
      problem_.grad_bias[(slot * problem_.queries + t) * problem_.cells() + at] += float(sum);
    }
  }

  void pass_to_state(const Inflow& later) const {
    const std::int64_t to = task_.in_state() + part_.first;
    for (int i = 0; i < part_.count; ++i) {
      Numbers of_num{}, of_den{};
      later.pass_to(all<double>(problem_.before.max[to + i]), of_num, of_den);
      problem_.grad_before.num[to + i] = of_num[i];
      problem_.grad_before.den[to + i] = -of_den[i];
    }
  }

  const Task<Element> task_;
  const Window& problem_;
  const Track<const Element> k_, v_;
  const std::int64_t ahead_;
  Part part_{};
};

}  // namespace
}  // namespace AFT_LEVEL
}  // namespace aft
