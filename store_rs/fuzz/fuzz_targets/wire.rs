//! See `mooncake_store_fuzz::wire`.
#![cfg_attr(fuzzing, no_main)]

mooncake_store_fuzz::target!(wire);
