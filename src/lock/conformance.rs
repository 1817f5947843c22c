//! The contract of [`DistributedLocker`] and [`ScopedLock`](crate::lock::ScopedLock) as functions
//! that any implementation can be run through.
//!
//! Each function checks one rule and panics if it is broken, with a text that says how: call them
//! from tests of your own, one by one ([`locker`], [`scoped`]) or all with [`check_locker`] and
//! [`check_scoped`](scoped::check_scoped). [`PooledLocker`](crate::lock::PooledLocker),
//! [`MemoryLocker`](crate::lock::MemoryLocker) and the scoped locks are run through them in the
//! tests of this crate, with nothing skipped.
//!
//! # Examples
//!
//! ```
//! use leasehold::lock::conformance::{Contract, check_locker};
//! use leasehold::lock::MemoryLocker;
//!
//! let first = MemoryLocker::new();
//! check_locker(&Contract::new(|| Box::new(first.peer())));
//! ```

pub mod locker;
pub mod scoped;

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::lock::DistributedLocker;

/// An implementation under test: how to make a locker, and how patient to be.
pub struct Contract<'a> {
    make: Box<dyn Fn() -> Box<dyn DistributedLocker> + Sync + 'a>,
    short: Duration,
    grace: Duration,
    excludes: bool,
}

impl<'a> Contract<'a> {
    /// `make` gives another locker with each call, and all of them contend for the same keys.
    #[must_use]
    pub fn new(make: impl Fn() -> Box<dyn DistributedLocker> + Sync + 'a) -> Contract<'a> {
        Contract {
            make: Box::new(make),
            short: Duration::from_millis(300),
            grace: Duration::from_secs(5),
            excludes: true,
        }
    }

    /// Sets a TTL that passes within a check, but not between two calls. Defaults to 300 ms.
    #[must_use]
    pub fn short_ttl(mut self, ttl: Duration) -> Contract<'a> {
        self.short = ttl;
        self
    }

    /// Sets how long after its TTL a lapsed lock may still keep others out. Defaults to 5 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Contract<'a> {
        self.grace = grace;
        self
    }

    /// Says that the implementation grants every lock to everybody: the checks that somebody is
    /// kept out are skipped.
    #[must_use]
    pub fn grants_always(mut self) -> Contract<'a> {
        self.excludes = false;
        self
    }

    /// True if `check_locker` runs `check`, one of [`CHECKS`].
    #[must_use]
    pub fn runs(&self, check: &Check) -> bool {
        self.excludes || !check.needs_exclusion
    }

    fn locker(&self) -> Box<dyn DistributedLocker> {
        (self.make)()
    }
}

impl fmt::Debug for Contract<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contract")
            .field("short_ttl", &self.short)
            .field("grace", &self.grace)
            .field("grants_always", &!self.excludes)
            .finish_non_exhaustive()
    }
}

/// One rule: its name, and the function that checks it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Check {
    /// What must hold.
    pub name: &'static str,
    /// Panics if it does not.
    pub check: fn(&Contract<'_>),
    /// Whether it can only hold if locks keep others out.
    pub needs_exclusion: bool,
}

macro_rules! checks {
    ($($name:ident $needs:literal),* $(,)?) => {
        /// Every rule of [`DistributedLocker`], in the order of [`check_locker`].
        pub const CHECKS: &[Check] = &[
            $(Check { name: stringify!($name), check: locker::$name, needs_exclusion: $needs },)*
        ];
    };
}

checks! {
    handle_echoes_key_and_ttl false,
    empty_key_is_refused false,
    zero_ttl_is_refused false,
    refresh_with_zero_leaves_the_ttl false,
    held_key_is_refused true,
    distinct_keys_are_independent false,
    released_key_is_reacquirable false,
    dropped_key_is_reacquirable false,
    one_of_eight_racers_wins true,
    lock_is_seen_by_another_locker true,
    second_release_is_not_held false,
    refresh_after_release_is_not_held false,
    refresh_outlives_the_first_ttl true,
    release_after_lapse_is_not_held false,
    refresh_after_lapse_is_not_held false,
    lapsed_key_is_acquirable_by_others false,
    ping_is_answered false,
    close_releases_and_refuses false,
}

/// Runs every check of [`CHECKS`] that [applies](Contract::runs).
///
/// # Panics
///
/// If the implementation breaks a rule.
pub fn check_locker(contract: &Contract<'_>) {
    for check in CHECKS.iter().filter(|check| contract.runs(check)) {
        (check.check)(contract);
    }
}

/// A key that no other check, test or process uses.
pub(crate) fn fresh_key(purpose: &str) -> String {
    format!("conformance-{purpose}-{:016x}", fastrand::u64(..))
}

#[track_caller]
pub(crate) fn must<T>(what: &str, result: Result<T, Error>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{what}: {}", error.chain()),
    }
}

#[track_caller]
pub(crate) fn refused<T>(what: &str, result: Result<T, Error>, expected: &Error) {
    match result {
        Err(error) if std::mem::discriminant(&error) == std::mem::discriminant(expected) => {}
        Err(error) => panic!("{what}: expected `{expected}`, got `{}`", error.chain()),
        Ok(_) => panic!("{what}: expected `{expected}`, it was granted"),
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use crate::lock::{MemoryLocker, NoopLocker};

    #[test]
    fn the_memory_locker_conforms() {
        let first = MemoryLocker::new();
        check_locker(
            &Contract::new(|| Box::new(first.peer())).short_ttl(Duration::from_millis(40)),
        );
    }

    #[test]
    fn the_noop_locker_conforms_but_for_exclusion() {
        let make = || Box::new(NoopLocker::new()) as _;
        check_locker(&Contract::new(make).short_ttl(Duration::from_millis(40)).grants_always());
    }

    /// The checks can fail: a locker that grants always breaks each rule of exclusion.
    #[test]
    fn a_locker_that_excludes_nobody_is_caught() {
        let make = || Box::new(NoopLocker::new()) as _;
        let contract = Contract::new(make).short_ttl(Duration::from_millis(40));
        let exclusion: Vec<_> = CHECKS.iter().filter(|check| check.needs_exclusion).collect();
        assert_eq!(exclusion.len(), 4);
        for check in exclusion {
            let run = std::panic::AssertUnwindSafe(|| (check.check)(&contract));
            assert!(std::panic::catch_unwind(run).is_err(), "{}", check.name);
        }
    }
}
