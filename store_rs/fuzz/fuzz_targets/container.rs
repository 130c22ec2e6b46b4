//! See `mooncake_store_fuzz::container`.
#![cfg_attr(fuzzing, no_main)]

mooncake_store_fuzz::target!(container);
