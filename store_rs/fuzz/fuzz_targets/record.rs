//! See `mooncake_store_fuzz::record`.
#![cfg_attr(fuzzing, no_main)]

mooncake_store_fuzz::target!(record);
