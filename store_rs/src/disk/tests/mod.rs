//! The tier on a simulated disk, and on a real one.

mod fake;
mod real;
mod simulation;
