//! What a [`Locker`](crate::Locker) is configured with.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::JITTER_PERCENT;
use crate::error::Error;
use crate::event::{Event, OnEvent};
use crate::key::LEASE_NAMESPACE;
use crate::lease::budget::Budget;
use crate::lease::life::Pace;

/// How often a standby tries again: 5 s.
pub const DEFAULT_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// How often a holder proves its lease: 5 s.
pub const DEFAULT_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// How long a statement may take: 10 s.
pub const DEFAULT_QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// `idle_session_timeout` came with PostgreSQL 14.
const IDLE_TIMEOUT_SINCE: i32 = 140_000;
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// The server counts its time-outs in milliseconds, as a 32-bit integer.
const LONGEST_TTL: Duration = Duration::from_millis(i32::MAX as u64);
/// The server truncates longer names.
const LONGEST_NAME: usize = 63;

/// How long the *server* keeps a session from which it hears nothing while it holds a lease
/// (`idle_session_timeout`, PostgreSQL 14 and later).
///
/// This is what frees the lease of a holder that vanished without a word: power loss, a cut wire,
/// a stopped or suspended process.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SessionTtl {
    /// Heartbeat interval plus query time-out, plus a tenth of that, at least 1 s. The default.
    #[default]
    Auto,
    /// This long. Must be more than heartbeat interval plus query time-out, so that the holder's
    /// own deadline passes first, and at most 2^31 - 1 ms, almost 25 days.
    Fixed(Duration),
    /// Never: only TCP keepalives end the session of a holder that vanished.
    Off,
}

/// Options of a [`Locker`](crate::Locker). The default is fit for production.
///
/// Setters take and give back the value; nothing is checked until
/// [`Locker::new`](crate::Locker::new), which refuses what cannot work with
/// [`Error::InvalidOption`], the violated inequality in its text.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use leasehold::Options;
///
/// let options = Options::new()
///     .heartbeat_interval(Duration::from_secs(2))
///     .query_timeout(Duration::from_secs(3));
/// println!("{}", options.budget());
/// ```
#[derive(Clone)]
pub struct Options {
    pub(crate) retry_interval: Duration,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) query_timeout: Duration,
    pub(crate) session_ttl: SessionTtl,
    pub(crate) namespace: i32,
    pub(crate) application_name: Option<String>,
    pub(crate) watch: bool,
    pub(crate) allow_step_down: bool,
    pub(crate) on_event: Option<OnEvent>,
}

impl Options {
    /// The defaults.
    #[must_use]
    pub fn new() -> Options {
        Options {
            retry_interval: DEFAULT_RETRY_INTERVAL,
            heartbeat_interval: DEFAULT_HEARTBEAT_INTERVAL,
            query_timeout: DEFAULT_QUERY_TIMEOUT,
            session_ttl: SessionTtl::Auto,
            namespace: LEASE_NAMESPACE,
            application_name: None,
            watch: false,
            allow_step_down: false,
            on_event: None,
        }
    }

    /// Sets how often a standby tries for what it waits for, if nothing tells it sooner; up to
    /// 20 % are added at random.
    ///
    /// Defaults to 5 s. From 10 ms to a day.
    #[must_use]
    pub fn retry_interval(mut self, interval: Duration) -> Options {
        self.retry_interval = interval;
        self
    }

    /// Sets how often a holder proves to itself that its session lives and holds its leases.
    ///
    /// Defaults to 5 s. From 10 ms to a day.
    #[must_use]
    pub fn heartbeat_interval(mut self, interval: Duration) -> Options {
        self.heartbeat_interval = interval;
        self
    }

    /// Sets how long a statement, or opening a session, may take. Most methods of a
    /// [`Locker`](crate::Locker) block for no longer.
    ///
    /// Defaults to 10 s. From 10 ms to a day.
    #[must_use]
    pub fn query_timeout(mut self, timeout: Duration) -> Options {
        self.query_timeout = timeout;
        self
    }

    /// Sets how long the server keeps the session of a holder from which it hears nothing.
    ///
    /// Defaults to [`SessionTtl::Auto`].
    #[must_use]
    pub fn session_ttl(mut self, ttl: SessionTtl) -> Options {
        self.session_ttl = ttl;
        self
    }

    /// Sets the namespace of names: see [`Key::new`](crate::Key::new). Processes contend for a
    /// name only within one namespace of one database.
    ///
    /// Defaults to [`LEASE_NAMESPACE`].
    #[must_use]
    pub fn namespace(mut self, namespace: i32) -> Options {
        self.namespace = namespace;
        self
    }

    /// Sets the session's `application_name`, as seen in `pg_stat_activity`.
    ///
    /// Defaults to the one in the connection's configuration, else `leasehold`. At most 63 bytes,
    /// none of them NUL.
    #[must_use]
    pub fn application_name(mut self, name: impl Into<String>) -> Options {
        self.application_name = Some(name.into());
        self
    }

    /// Sets whether a standby watches the holder's session, over one more session of its own.
    ///
    /// Then it takes over within 50 ms of a holder's death, rather than at its next try. The second
    /// session exists only while something is waited for. Defaults to `false`.
    #[must_use]
    pub fn watch(mut self, watch: bool) -> Options {
        self.watch = watch;
        self
    }

    /// Sets whether other processes may ask for the leases of this one; see
    /// [`Locker::step_down`](crate::Locker::step_down).
    ///
    /// Anyone who may connect to the database can ask. Defaults to `false`.
    #[must_use]
    pub fn allow_step_down(mut self, allow: bool) -> Options {
        self.allow_step_down = allow;
        self
    }

    /// Sets what is called with each [`Event`], in order.
    ///
    /// It runs on the thread `leasehold-event`, which also writes to `log`. It may be slow: leases
    /// do not wait for it. Beyond 4,096 events behind, events are dropped, and counted in
    /// [`Event::Dropped`]. Defaults to nothing.
    #[must_use]
    pub fn on_event(mut self, f: impl Fn(&Event) + Send + Sync + 'static) -> Options {
        self.on_event = Some(Arc::new(f));
        self
    }

    /// The bounds that follow from these options.
    #[must_use]
    pub fn budget(&self) -> Budget {
        Budget::of(self)
    }

    pub(crate) fn pace(&self) -> Pace {
        let Options { heartbeat_interval, query_timeout, .. } = *self;
        Pace { heartbeat_interval, query_timeout }
    }

    /// How long after the start of the last answered statement a lease is lost.
    pub(crate) fn window(&self) -> Duration {
        self.pace().window()
    }

    /// How long the server keeps a silent holder's session; `None` if it has no such limit.
    pub(crate) fn ttl(&self) -> Option<Duration> {
        match self.session_ttl {
            SessionTtl::Auto => Some(self.window() + margin(self.window())),
            SessionTtl::Fixed(ttl) => Some(ttl),
            SessionTtl::Off => None,
        }
    }

    /// The longest wait between two tries of a standby.
    pub(crate) fn longest_retry(&self) -> Duration {
        self.retry_interval + self.retry_interval / 100 * (JITTER_PERCENT as u32)
    }

    /// How long the server keeps a silent session that holds no lease: longer than a standby's
    /// pause between two statements.
    pub(crate) fn standby_ttl(&self) -> Option<Duration> {
        let pause = self.longest_retry() + self.query_timeout;
        self.ttl().map(|ttl| ttl.max(pause + margin(pause)))
    }

    /// What the server's idle limit is switched between, with leases and without, in its unit;
    /// `None` where it stays as it is.
    pub(crate) fn idle_limits(&self, server_version: i32) -> Option<(String, String)> {
        let (held, idle) = (self.ttl()?, self.standby_ttl()?);
        let switched = server_version >= IDLE_TIMEOUT_SINCE && held != idle;
        switched.then(|| (held.as_millis().to_string(), idle.as_millis().to_string()))
    }

    pub(crate) fn validate(&self) -> Result<(), Error> {
        let durations = [
            ("retry_interval", self.retry_interval),
            ("heartbeat_interval", self.heartbeat_interval),
            ("query_timeout", self.query_timeout),
        ];
        for (name, value) in durations {
            if value < SHORTEST || value > LONGEST {
                return Err(Error::invalid(format!(
                    "{name} must satisfy {SHORTEST:?} <= {name} <= {LONGEST:?}, and is {value:?}"
                )));
            }
        }
        if let SessionTtl::Fixed(ttl) = self.session_ttl {
            let (h, q) = (self.heartbeat_interval, self.query_timeout);
            if ttl <= h + q {
                return Err(Error::invalid(format!(
                    "session_ttl must satisfy session_ttl > heartbeat_interval + query_timeout, \
                     and {ttl:?} <= {h:?} + {q:?}: the server would free the lease before its \
                     holder knows"
                )));
            }
            if ttl > LONGEST_TTL {
                return Err(Error::invalid(format!(
                    "session_ttl must satisfy session_ttl <= {LONGEST_TTL:?}, and is {ttl:?}"
                )));
            }
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
}

/// What is added to a time of ours to make a time of the server's.
fn margin(of: Duration) -> Duration {
    (of / 10).max(Duration::from_secs(1))
}

impl Default for Options {
    fn default() -> Options {
        Options::new()
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("retry_interval", &self.retry_interval)
            .field("heartbeat_interval", &self.heartbeat_interval)
            .field("query_timeout", &self.query_timeout)
            .field("session_ttl", &self.session_ttl)
            .field("namespace", &self.namespace)
            .field("application_name", &self.application_name)
            .field("watch", &self.watch)
            .field("allow_step_down", &self.allow_step_down)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;

    fn rule(options: Options) -> String {
        match options.validate() {
            Err(error) => error.to_string(),
            Ok(()) => panic!("accepted: {options:?}"),
        }
    }

    #[test]
    fn the_defaults_are_valid_and_are_what_the_documentation_says() {
        let options = Options::default();
        options.validate().unwrap();
        assert_eq!(options.ttl(), Some(Duration::from_millis(16_500)));
        assert_eq!(options.longest_retry(), Duration::from_secs(6));
        assert!(options.standby_ttl() > options.ttl());
    }

    #[test]
    fn zero_and_absurd_durations_are_refused_by_name() {
        let options = Options::new;
        for bad in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            assert!(rule(options().retry_interval(bad)).contains("<= retry_interval <="));
            assert!(rule(options().heartbeat_interval(bad)).contains("<= heartbeat_interval <="));
            assert!(rule(options().query_timeout(bad)).contains("<= query_timeout <="));
        }
    }

    #[test]
    fn a_ttl_that_ends_before_the_holders_deadline_is_refused() {
        let fixed = |d| Options::new().session_ttl(SessionTtl::Fixed(d));
        let text = rule(fixed(Duration::from_secs(15)));
        assert!(text.contains("session_ttl > heartbeat_interval + query_timeout"), "{text}");
        assert!(text.contains("15s <= 5s + 10s"), "{text}");
        fixed(Duration::from_millis(15_001)).validate().unwrap();
        assert!(rule(fixed(Duration::MAX)).contains("session_ttl <="));
    }

    #[test]
    fn the_longest_durations_still_fit_the_server() {
        let day = Duration::from_secs(24 * 3600);
        let options = Options::new().retry_interval(day).heartbeat_interval(day).query_timeout(day);
        options.validate().unwrap();
        assert!(options.standby_ttl().unwrap() <= LONGEST_TTL);
    }

    #[test]
    fn application_names_that_the_server_would_bend_are_refused() {
        assert!(rule(Options::new().application_name("x".repeat(64))).contains("63 bytes"));
        assert!(rule(Options::new().application_name("a\0b")).contains("NUL"));
    }
}
