//! The tier on a simulated disk, and on a real one.

mod broken;
mod fake;
mod real;
mod simulation;
