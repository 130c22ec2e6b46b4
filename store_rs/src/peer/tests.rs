//! Greetings, frames and TLS over real sockets on loopback.
