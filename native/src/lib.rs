//! The router's static library: tokenizers and chat templates behind C functions. They are
//! in one library, because two Rust static libraries in one Go binary would each bring
//! their own runtime.

// For limits.rs; scripts/build-native.sh permits it on a stable compiler.
#![cfg_attr(feature = "alloc_error_hook", feature(alloc_error_hook))]

mod chat;
mod daulet;
mod detect;
mod encode;
mod fast;
mod filters;
mod guarded;
mod limits;
mod python;
mod regexes;
mod source;
mod stack;
