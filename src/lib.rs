//! Run a named job on one process at a time, over PostgreSQL advisory locks.
//!
//! Replicas of a program all call [`Locker::run`] with the same name; one of them runs the job, and
//! another takes over when it ends, dies or is cut off. There is no schema, no extra server, no
//! async runtime to bring, and no privilege needed beyond `CONNECT`: a lease is a session-level
//! [advisory lock], held by one session per process, however many leases there are.
//!
//! ```no_run
//! use std::time::Duration;
//! use leasehold::{CancellationToken, Error, Lease, Locker, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locker = Locker::new("postgres://app@db/app".parse()?, Options::new())?;
//! let stop = CancellationToken::new(); // set it from the thread that waits for signals
//!
//! locker.run(&stop, "send-invoices", |lease: &Lease| {
//!     while !lease.wait_timeout(Duration::from_secs(60)) {
//!         println!("sending, term {}", lease.token());
//!     }
//!     Ok::<(), Error>(()) // told to stop: cancelled, closing, or the lease lost
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it is for, and what it is not
//!
//! For jobs that do harm when two replicas run them at once: billing, migrations, compaction, a
//! consumer that must be alone. A job that tolerates company needs no lease. A lease is not a queue,
//! gives no fairness among standbys, and does not work through a pooler in transaction mode, which
//! is refused with [`Error::TransactionPooling`].
//!
//! # Terms
//!
//! The *holder* of a lease runs its job for a *term*; *standbys* wait. Each term has a
//! [`FencingToken`], greater than all before it. A term ends by *release*, after the job has
//! returned, or by *loss*: then the job is told through its [`CancellationToken`], and
//! [`Lease::is_held`] turns false.
//!
//! # What is promised
//!
//! - Two replicas never hold one lease while the first holder's session lives.
//! - A session that the server ended is seen within 50 ms by every job on it.
//! - A session that falls silent is lost by the holder's own clock, heartbeat interval plus query
//!   time-out after the start of the last answered statement, whatever else is stuck; the server
//!   keeps the lock for longer than that (PostgreSQL 14 and later), so a partition causes no
//!   overlap.
//! - A holder that vanished frees its leases by the server's own time-out (PostgreSQL 14 and later;
//!   on 13 by TCP keepalives).
//! - On release a standby leads within 50 ms where notifications arrive, and else at its next try.
//!
//! [`Options::budget`] computes the bounds for given options. What remains is overlap after a
//! session that *died*, for as long as the job takes to notice: the chapter [`overlap`] says how to
//! make it harmless, with a [`FencingToken`] or a [guarded transaction](Lease::guard).
//!
//! # Threads and blocking
//!
//! Every method documents how long it blocks; one that ends by its time limit takes up to 50 ms more
//! (leases) or 500 ms more (module [`lock`]) to say why. All methods work on any thread, also inside
//! an async runtime, where they block it as any blocking call does: what the driver would panic on
//! there is done by threads of the library, named `leasehold-...`. For leases these threads do it
//! everywhere; module [`lock`] saves the detour outside a runtime. [`Lease::guard`] is the exception:
//! it works on the caller's connection.
//!
//! # Logging
//!
//! Events go to the [`log`] facade under the target `leasehold`, one line each, and to
//! [`Options::on_event`]: errors are losses, overruns and releases that were not confirmed; warnings
//! are outages and late answers; info are terms; debug are sessions, waiting, and the locks of module
//! [`lock`] ([`LockConfig::on_event`](lock::LockConfig::on_event)) that go well.
//!
//! [advisory lock]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS
//! [`log`]: https://docs.rs/log

mod backoff;
mod cancel;
mod clock;
mod error;
mod event;
mod key;
mod lease;
pub mod lock;
mod session;
mod token;

#[doc = include_str!("../docs/overlap.md")]
pub mod overlap {}

// Their types are in our signatures.
pub use {postgres, r2d2, r2d2_postgres};

pub use cancel::{CancelReason, CancellationToken, DropGuard};
pub use error::{Error, GuardRefusal, LostReason, RunError, Timeout};
pub use event::{Event, LockEvent};
pub use key::{Key, LEASE_NAMESPACE, key};
pub use lease::budget::Budget;
pub use lease::lease::{Lease, LeaseGuard};
pub use lease::locker::{Holder, Locker};
pub use lease::options::{
    DEFAULT_HEARTBEAT_INTERVAL, DEFAULT_QUERY_TIMEOUT, DEFAULT_RETRY_INTERVAL, Options, SessionTtl,
};
pub use token::{FencingToken, ParseTokenError};
