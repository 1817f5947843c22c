//! Every promise, against real servers. Modules are named by what they prove.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on fails, and says where"
)]

#[allow(dead_code, unreachable_pub, unused_imports, reason = "each binary uses a part")]
#[path = "../support/mod.rs"]
mod support;

mod bad_input;
mod bounds;
mod closing;
mod doubt;
mod examples;
mod faults;
mod fencing;
mod guards;
mod harness;
mod lock_breaker;
mod lock_conformance;
mod lock_faults;
mod lock_forks;
mod lock_pooled;
mod lock_runtime;
mod lock_scoped;
mod losses;
mod old_servers;
mod outages;
mod poolers;
mod replica;
mod run_table;
mod scale;
mod server_facts;
mod standbys;
mod threads;
mod tls;
mod types;
