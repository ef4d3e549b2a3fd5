//! The router's static library: the C functions of github.com/daulet/tokenizers
//! and chat templates on minijinja, behind one name, because two Rust static
//! libraries in one Go binary would each bring their own runtime.

// scripts/build-native.sh sets TOKENIZERS_SRC to the Go module's folder.
include!(concat!(env!("TOKENIZERS_SRC"), "/src/lib.rs"));

mod chat;
mod detect;
mod encode;
mod fast;
mod filters;
mod python;
mod source;
