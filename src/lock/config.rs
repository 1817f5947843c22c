//! What lockers of this module are configured with.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::event::{Event, OnEvent};
use crate::lock::breaker::{CircuitBreaker, NoBreaker};
use crate::session::connect::SessionOptions;

/// How long to wait for a pooled connection: 5 s.
pub const DEFAULT_CONN_WAIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a statement may take: 10 s.
const DEFAULT_QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// How many sessions a pool of ours has at most.
const DEFAULT_POOL_SIZE: u32 = 10;
/// The server counts its limits in milliseconds, as a 32-bit integer.
const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST_NAME: usize = 63;

/// Options of a [`PooledLocker`](crate::lock::PooledLocker) and of a
/// [`ScopedLocker`](crate::lock::ScopedLocker). The default is fit for production.
///
/// Setters take and give back the value; nothing is checked until the constructor of the locker,
/// which refuses what cannot work with [`Error::InvalidOption`].
#[derive(Clone)]
pub struct LockConfig {
    pub(crate) namespace: i32,
    pub(crate) conn_wait_timeout: Option<Duration>,
    pub(crate) query_timeout: Duration,
    pub(crate) pool_size: u32,
    pub(crate) enforce_ttl: bool,
    pub(crate) application_name: Option<String>,
    pub(crate) max_wait: Option<Duration>,
    pub(crate) wait_slice: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) breaker: Arc<dyn CircuitBreaker>,
    pub(crate) on_event: Option<OnEvent>,
}

impl LockConfig {
    /// The defaults.
    #[must_use]
    pub fn new() -> LockConfig {
        LockConfig {
            namespace: 0,
            conn_wait_timeout: Some(DEFAULT_CONN_WAIT_TIMEOUT),
            query_timeout: DEFAULT_QUERY_TIMEOUT,
            pool_size: DEFAULT_POOL_SIZE,
            enforce_ttl: true,
            application_name: None,
            max_wait: None,
            wait_slice: None,
            max_hold: None,
            breaker: Arc::new(NoBreaker),
            on_event: None,
        }
    }

    /// Sets the namespace: locks of one key in two namespaces do not meet.
    ///
    /// Defaults to 0, which leases do not use, and in which services in other languages that hash
    /// as [`Key`](crate::Key) says contend for the same locks.
    #[must_use]
    pub fn namespace(mut self, namespace: i32) -> LockConfig {
        self.namespace = namespace;
        self
    }

    /// Sets how long to wait for a pooled connection when all are in use; `None` waits for ever.
    /// Waiting too long is [`Error::NotAcquired`].
    ///
    /// Defaults to 5 s. With `None`, a database that cannot be reached still ends the wait, after
    /// 5 s.
    #[must_use]
    pub fn conn_wait_timeout(mut self, timeout: Option<Duration>) -> LockConfig {
        self.conn_wait_timeout = timeout;
        self
    }

    /// Sets how long a statement, or opening a session, may take.
    ///
    /// Defaults to 10 s. From 10 ms to 24 days, as for all limits here 2^31 - 1 ms to be exact.
    #[must_use]
    pub fn query_timeout(mut self, timeout: Duration) -> LockConfig {
        self.query_timeout = timeout;
        self
    }

    /// Sets how many sessions a pool of ours has at most: as many locks can be held, or scoped
    /// locks held and waited for, at once. A pool of the user's keeps its own size.
    ///
    /// Defaults to 10. At least 1.
    #[must_use]
    pub fn pool_size(mut self, size: u32) -> LockConfig {
        self.pool_size = size;
        self
    }

    /// Sets whether the server ends the session of a [`Lock`](crate::lock::Lock) that was not
    /// refreshed in time, from PostgreSQL 14 on.
    ///
    /// Defaults to `true`. With `false` the TTL is bookkeeping on the client alone: a holder that
    /// ignores it, or is stopped, keeps the lock.
    #[must_use]
    pub fn enforce_ttl(mut self, enforce: bool) -> LockConfig {
        self.enforce_ttl = enforce;
        self
    }

    /// Sets the name of our sessions in `pg_stat_activity`; at most 63 bytes, none of them
    /// NUL.
    ///
    /// Defaults to the one in the configuration of the connection, or `leasehold`.
    #[must_use]
    pub fn application_name(mut self, name: impl Into<String>) -> LockConfig {
        self.application_name = Some(name.into());
        self
    }

    /// Sets how long [`ScopedLocker::with_lock`](crate::lock::ScopedLocker::with_lock) waits for
    /// the lock at most; waiting too long is [`Error::NotAcquired`].
    ///
    /// Defaults to `None`: until it is granted or cancelled. From 10 ms to 24
    /// days.
    #[must_use]
    pub fn max_wait(mut self, wait: Option<Duration>) -> LockConfig {
        self.max_wait = wait;
        self
    }

    /// Sets whether waiters of a [`ScopedLocker`](crate::lock::ScopedLocker) leave the server's
    /// queue and join it anew each time this has passed.
    ///
    /// A waiter in the queue has a snapshot, which holds back vacuum and lets
    /// `CREATE INDEX CONCURRENTLY` wait: never for longer than a slice, if there are slices. The
    /// price is the order: a waiter that joins anew is last.
    ///
    /// Defaults to `None`: waiters stay in the queue, and are served in order. From 10 ms to 24
    /// days.
    #[must_use]
    pub fn wait_slice(mut self, slice: Option<Duration>) -> LockConfig {
        self.wait_slice = slice;
        self
    }

    /// Sets how long the closure of a [`ScopedLocker`](crate::lock::ScopedLocker) may take before
    /// the server ends its session, and with it the lock.
    ///
    /// Defaults to `None`: as long as it takes. A process that is stopped then keeps its lock. From 10 ms to 24
    /// days.
    #[must_use]
    pub fn max_hold(mut self, hold: Option<Duration>) -> LockConfig {
        self.max_hold = hold;
        self
    }

    /// Sets the circuit breaker.
    ///
    /// Defaults to one that never opens.
    #[must_use]
    pub fn breaker(mut self, breaker: impl CircuitBreaker + 'static) -> LockConfig {
        self.breaker = Arc::new(breaker);
        self
    }

    /// Sets what is called with each [`Event`], on a thread named `leasehold-event`, in order.
    /// A listener that is slow or panics delays and harms nothing but its own events: beyond 4,096
    /// behind, events are dropped, and counted in [`Event::Dropped`].
    ///
    /// Defaults to none. Events go to `log` in any case: on that thread, and without a listener on the
    /// one that caused them.
    #[must_use]
    pub fn on_event(mut self, listener: impl Fn(&Event) + Send + Sync + 'static) -> LockConfig {
        self.on_event = Some(Arc::new(listener));
        self
    }

    /// Refuses what cannot work.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let limits = [
            ("query_timeout", Some(self.query_timeout)),
            ("max_wait", self.max_wait),
            ("wait_slice", self.wait_slice),
            ("max_hold", self.max_hold),
        ];
        for (name, value) in limits {
            let Some(value) = value else { continue };
            if value < SHORTEST || value > LONGEST {
                return Err(Error::invalid(format!(
                    "{name} must satisfy {SHORTEST:?} <= {name} <= {LONGEST:?}, and is {value:?}"
                )));
            }
        }
        if self.pool_size == 0 {
            return Err(Error::invalid("pool_size must satisfy pool_size >= 1, and is 0"));
        }
        match &self.application_name {
            Some(name) if name.len() > LONGEST_NAME => Err(Error::invalid(format!(
                "application_name must satisfy length <= {LONGEST_NAME} bytes, and has {}",
                name.len()
            ))),
            Some(name) if name.contains('\0') => {
                Err(Error::invalid("application_name must not contain NUL"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn session_options(&self) -> SessionOptions {
        SessionOptions {
            query_timeout: self.query_timeout,
            idle_timeout: None,
            vanished_after: self.query_timeout,
            lock_timeout: None,
            listen: false,
            application_name: self.application_name.clone(),
        }
    }
}

/// Refuses a time to live of zero, or beyond what the server can keep.
pub(crate) fn check_ttl(ttl: Duration) -> Result<(), Error> {
    if ttl.is_zero() || ttl > LONGEST { Err(Error::InvalidTtl) } else { Ok(()) }
}

impl Default for LockConfig {
    fn default() -> LockConfig {
        LockConfig::new()
    }
}

impl fmt::Debug for LockConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockConfig")
            .field("namespace", &self.namespace)
            .field("conn_wait_timeout", &self.conn_wait_timeout)
            .field("query_timeout", &self.query_timeout)
            .field("pool_size", &self.pool_size)
            .field("enforce_ttl", &self.enforce_ttl)
            .field("application_name", &self.application_name)
            .field("max_wait", &self.max_wait)
            .field("wait_slice", &self.wait_slice)
            .field("max_hold", &self.max_hold)
            .field("on_event", &self.on_event.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;

    #[test]
    fn options_that_cannot_work_are_refused_with_the_violated_rule() {
        let zero = Some(Duration::ZERO);
        let bad = [
            (LockConfig::new().query_timeout(Duration::ZERO), "<= query_timeout <="),
            (LockConfig::new().max_wait(zero), "10ms <= max_wait <= 2147483.647s, and is 0ns"),
            (LockConfig::new().wait_slice(zero), "<= wait_slice <="),
            (LockConfig::new().max_hold(Some(Duration::MAX)), "<= max_hold <="),
            (LockConfig::new().pool_size(0), "pool_size >= 1, and is 0"),
            (LockConfig::new().application_name("x".repeat(64)), "63 bytes, and has 64"),
            (LockConfig::new().application_name("a\0b"), "NUL"),
        ];
        for (config, rule) in bad {
            let text = config.validate().unwrap_err().to_string();
            assert!(text.contains(rule), "{text}");
        }
        LockConfig::new().validate().unwrap();
        LockConfig::new().conn_wait_timeout(zero).validate().unwrap();
    }

    #[test]
    fn a_ttl_is_more_than_zero_and_within_the_servers_range() {
        assert!(check_ttl(Duration::ZERO).is_err() && check_ttl(Duration::MAX).is_err());
        assert!(check_ttl(Duration::from_nanos(1)).is_ok() && check_ttl(LONGEST).is_ok());
    }
}
