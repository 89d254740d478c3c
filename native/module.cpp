// The kernels as a Python module: pointers, sizes and strides come from aft/ops/native.py, which checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "levels.hpp"
#include "memory.hpp"
#include "simple.hpp"
#include "threads.hpp"
#include "window.hpp"

namespace nb = nanobind;

namespace {

aft::Rows rows(std::uintptr_t data, std::int64_t batch_stride, std::int64_t time_stride) {
  return {reinterpret_cast<void*>(data), batch_stride, time_stride};
}

float* floats(std::uintptr_t data) { return reinterpret_cast<float*>(data); }

double* doubles(std::uintptr_t data) { return reinterpret_cast<double*>(data); }

}  // namespace

NB_MODULE(_native, module) {
  module.def("levels", &aft::levels);
  module.def("level", [] { return std::string(aft::level().name); });
  module.def("use_level", &aft::use_level);
  module.def("use_team", [](std::uintptr_t start) { aft::use_team(reinterpret_cast<aft::Team>(start)); });
  module.def("expect_writes", [](std::uintptr_t data, std::int64_t bytes) {
    aft::expect_writes(reinterpret_cast<void*>(data), bytes);
  });
  module.attr("BLOCK") = aft::kBlock;
  module.attr("SAVED_FIELDS") = static_cast<int>(aft::kSavedFields);

  nb::class_<aft::Rows>(module, "Rows")
      .def("__init__", [](aft::Rows* self, std::uintptr_t data, std::int64_t batch, std::int64_t time) {
        new (self) aft::Rows(rows(data, batch, time));
      });

  nb::class_<aft::State>(module, "State")
      .def("__init__", [](aft::State* self, std::uintptr_t num, std::uintptr_t den, std::uintptr_t max) {
        new (self) aft::State{doubles(num), doubles(den), doubles(max)};
      });

  nb::class_<aft::Simple>(module, "Simple")
      .def(nb::init<>())
      .def_rw("batches", &aft::Simple::batches)
      .def_rw("queries", &aft::Simple::queries)
      .def_rw("keys", &aft::Simple::keys)
      .def_rw("channels", &aft::Simple::channels)
      .def_rw("causal", &aft::Simple::causal)
      .def_rw("gated", &aft::Simple::gated)
      .def_rw("bfloat16", &aft::Simple::bfloat16)
      .def_rw("q", &aft::Simple::q)
      .def_rw("k", &aft::Simple::k)
      .def_rw("v", &aft::Simple::v)
      .def_rw("hidden", &aft::Simple::hidden)
      .def_rw("before", &aft::Simple::before)
      .def_rw("after", &aft::Simple::after)
      .def_rw("grad_after", &aft::Simple::grad_after)
      .def_rw("grad_before", &aft::Simple::grad_before)
      .def_rw("y", &aft::Simple::y)
      .def_rw("grad", &aft::Simple::grad)
      .def_rw("grad_q", &aft::Simple::grad_q)
      .def_rw("grad_k", &aft::Simple::grad_k)
      .def_rw("grad_v", &aft::Simple::grad_v)
      .def("save_to", [](aft::Simple& self, std::uintptr_t data) { self.saved = doubles(data); })
      .def("forward", &aft::simple_forward, nb::call_guard<nb::gil_scoped_release>())
      .def("backward", &aft::simple_backward, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<aft::Window>(module, "Window")
      .def(nb::init<>())
      .def_rw("batches", &aft::Window::batches)
      .def_rw("queries", &aft::Window::queries)
      .def_rw("keys", &aft::Window::keys)
      .def_rw("channels", &aft::Window::channels)
      .def_rw("causal", &aft::Window::causal)
      .def_rw("gated", &aft::Window::gated)
      .def_rw("bfloat16", &aft::Window::bfloat16)
      .def_rw("q", &aft::Window::q)
      .def_rw("k", &aft::Window::k)
      .def_rw("v", &aft::Window::v)
      .def_rw("hidden", &aft::Window::hidden)
      .def_rw("offset", &aft::Window::offset)
      .def_rw("behind", &aft::Window::behind)
      .def_rw("ahead", &aft::Window::ahead)
      .def_rw("has_bias_by_batch", &aft::Window::has_bias_by_batch)
      .def_rw("bias_batch_stride", &aft::Window::bias_batch_stride)
      .def_rw("bias_query_stride", &aft::Window::bias_query_stride)
      .def_rw("bias_key_stride", &aft::Window::bias_key_stride)
      .def_rw("width", &aft::Window::width)
      .def_rw("kernel_height", &aft::Window::kernel_height)
      .def_rw("kernel_width", &aft::Window::kernel_width)
      .def_rw("anchor_row", &aft::Window::anchor_row)
      .def_rw("anchor_column", &aft::Window::anchor_column)
      .def_rw("before", &aft::Window::before)
      .def_rw("grad_before", &aft::Window::grad_before)
      .def_rw("y", &aft::Window::y)
      .def_rw("grad", &aft::Window::grad)
      .def_rw("grad_q", &aft::Window::grad_q)
      .def_rw("grad_k", &aft::Window::grad_k)
      .def_rw("grad_v", &aft::Window::grad_v)
      .def_rw("has_wide_grad_k", &aft::Window::has_wide_grad_k)
      .def_rw("slots", &aft::Window::slots)
      .def("bias_at", [](aft::Window& self, std::intptr_t data, bool wide) {
        self.bias = reinterpret_cast<const void*>(data);
        self.has_wide_bias = wide;
      })
      .def("kernel_at", [](aft::Window& self, std::uintptr_t data) { self.kernel = floats(data); })
      .def("grad_bias_at", [](aft::Window& self, std::uintptr_t data) { self.grad_bias = floats(data); })
      .def("grad_kernel_at", [](aft::Window& self, std::uintptr_t data) { self.grad_kernel = doubles(data); })
      .def("most_slots", &aft::Window::most_slots)
      .def("forward", &aft::window_forward, nb::call_guard<nb::gil_scoped_release>())
      .def("backward", &aft::window_backward, nb::call_guard<nb::gil_scoped_release>());
}
