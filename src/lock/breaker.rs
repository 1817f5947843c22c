//! Circuit breakers: refuse at once while the database is known to be away.

use std::fmt;

/// Decides whether the database should be asked at all.
///
/// Locks ask [`can_proceed`](CircuitBreaker::can_proceed) before they touch the pool, and fail with
/// [`Error::CircuitOpen`](crate::Error::CircuitOpen) if it says no. Then they report each outcome:
///
/// | outcome | reported as |
/// | --- | --- |
/// | granted, refreshed, released, ping answered | success |
/// | held elsewhere | success |
/// | no free connection within `conn_wait_timeout` | success: that is load, not a fault |
/// | the server says that the lock is not held | success: it answered |
/// | connecting failed, or the pool said why it has no connection | failure |
/// | a statement failed or was not answered in time, the session has ended | failure |
/// | the endpoint is a standby or a transaction pooler | failure |
/// | empty key, invalid TTL, closed locker, open breaker, lock already lapsed or released | nothing |
/// | cancelled while waiting | nothing |
/// | the closure of a scoped lock failed or panicked | as its transaction ended |
///
/// Drops and `close` release without asking: a breaker must not keep locks. Neither does
/// [`Lock::token`](crate::lock::Lock::token) ask.
///
/// Methods are called from many threads at once and must not block.
pub trait CircuitBreaker: Send + Sync {
    /// True if the database may be asked.
    fn can_proceed(&self) -> bool;
    /// The database answered.
    fn succeeded(&self);
    /// The database could not be asked, or did not answer.
    fn failed(&self);
}

/// A breaker that never opens: the default.
#[derive(Copy, Clone, Debug, Default)]
pub struct NoBreaker;

impl CircuitBreaker for NoBreaker {
    fn can_proceed(&self) -> bool {
        true
    }

    fn succeeded(&self) {}

    fn failed(&self) {}
}

impl fmt::Debug for dyn CircuitBreaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CircuitBreaker").field("can_proceed", &self.can_proceed()).finish()
    }
}
