//! Every figure of the README, each beside its yardstick in the same run.
//!
//! `scripts/bench`, or `cargo bench --bench claims -- [name ..]`. Servers are started as the tests
//! start them, with `fsync` on. Ratios compare, absolute figures do not: wake-ups dominate, and they
//! cost what the machine makes of them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench that cannot go on ends, and its result is what it prints"
)]

/// The library's own statements: the yardstick runs the same ones on a bare client.
#[allow(dead_code, reason = "the yardsticks need a part")]
#[path = "../../src/session/statements.rs"]
mod statements;
#[allow(dead_code, unreachable_pub, unused_imports, reason = "each binary uses a part")]
#[path = "../../tests/support/mod.rs"]
mod support;

mod hand_over;
mod idle;
mod rate;
mod scale;
mod start;
mod table;

use support::child;

fn main() {
    if let Some(role) = child::role() {
        return hand_over::replica(&role);
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let benches: [(&str, fn()); 8] = [
        ("acquire", rate::one_caller),
        ("callers", rate::eight_callers),
        ("token", rate::price_of_the_token),
        ("hand-over", hand_over::graceful),
        ("kill", hand_over::killed_holder),
        ("loss", hand_over::killed_session),
        ("start", start::first_lease),
        ("idle", idle::cost),
    ];
    table::head();
    for (name, bench) in benches {
        if wanted.is_empty() || wanted.iter().any(|each| each == name) {
            bench();
        }
    }
    if wanted.is_empty() || wanted.iter().any(|each| each == "scale") {
        scale::curve();
    }
}
