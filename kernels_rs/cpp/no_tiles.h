// The tile scope of units without AMX: nothing.
#pragma once

namespace {

struct Tiles {
  Tiles() {}
};

}  // namespace
