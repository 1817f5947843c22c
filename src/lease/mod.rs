//! Leases: a named job on one process at a time.
//!
//! The caller's thread posts requests to the owner thread, which alone talks to the server, and
//! waits for replies with a deadline. What a lease knows about its session is a [`life::Life`],
//! shared by the owner, the watchdog and every lease of that session.

pub(crate) mod budget;
mod engine;
mod fence;
mod heartbeat;
#[allow(clippy::module_inception, reason = "the file is named after the type in it")]
pub(crate) mod lease;
pub(crate) mod life;
pub(crate) mod locker;
mod mailbox;
pub(crate) mod options;
mod owner;
mod reconnect;
mod registry;
mod release;
mod serve;
mod term;
mod watch;
mod watchdog;
