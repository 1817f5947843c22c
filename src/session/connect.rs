//! Opens a session that is fit to hold locks, or says why there is none.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use postgres::config::{Host, SslMode, SslNegotiation};
use postgres::tls::{MakeTlsConnect, TlsConnect};
use postgres::types::{ToSql, Type};
use postgres::{Client, Config, NoTls, Socket};

use super::proof::{Verdict, prove_apart};
use super::statements;
use super::tls::{Guarded, Security};
use super::transport::Guard;
use super::{Facts, Session, get, one, timeline};
use crate::error::{Error, Timeout};

/// The oldest server that has what tokens are made of: PostgreSQL 13.
const OLDEST_SERVER: i32 = 130_000;
/// How often the server looks whether the client of a waiting statement is still there.
const CONNECTION_CHECK: Duration = Duration::from_secs(1);
/// How long our own notification may take before standbys fall back to polling.
const NOTIFY_BOUND: Duration = Duration::from_secs(1);

/// What a session is opened with.
#[derive(Clone, Debug)]
pub(crate) struct SessionOptions {
    pub(crate) query_timeout: Duration,
    /// How long the server keeps a session from which it hears nothing, while it holds no lease.
    /// `None` leaves it to keepalives.
    pub(crate) idle_timeout: Option<Duration>,
    /// The same for the server's TCP layer.
    pub(crate) vanished_after: Duration,
    pub(crate) application_name: Option<String>,
    /// How long a statement may wait for a lock in the server; `None` for sessions that never wait.
    pub(crate) lock_timeout: Option<Duration>,
    /// Whether releases are to be heard of.
    pub(crate) listen: bool,
}

/// What opening a session found out, for the log.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Settings that the server does not have.
    pub(crate) missing: Vec<&'static str>,
    /// Limits of the server that were replaced: name, former value, ours.
    pub(crate) replaced: Vec<(String, String, String)>,
}

type Dialled = (Client, Option<Arc<Guard>>);
type Dial = Box<dyn Fn() -> Result<Dialled, Error> + Send + Sync>;

/// Opens sessions to one configured database. The user's TLS type ends here.
pub(crate) struct Connector {
    dial: Dial,
    pub(super) options: SessionOptions,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Connector {
    /// A connector without TLS.
    pub(crate) fn plain(config: &Config, options: SessionOptions) -> Connector {
        let mode = match config.get_ssl_mode() {
            SslMode::Require => SslMode::Require,
            _ => SslMode::Disable,
        };
        Connector::new(config, NoTls, mode, options)
    }

    /// A connector with the user's TLS, as `sslmode` says.
    pub(crate) fn with_tls<T>(config: &Config, tls: T, options: SessionOptions) -> Connector
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        Connector::new(config, tls, config.get_ssl_mode(), options)
    }

    fn new<T>(config: &Config, tls: T, mode: SslMode, options: SessionOptions) -> Connector
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let security = Security { mode, negotiation: config.get_ssl_negotiation() };
        let config = prepare(config, &options);
        let bound = options.query_timeout;
        let dial: Dial = if config.get_hosts().iter().any(|host| matches!(host, Host::Unix(_))) {
            Box::new(move || match config.connect(NoTls) {
                Ok(client) => Ok((client, None)),
                Err(error) => Err(Error::Connect(Arc::new(error))),
            })
        } else {
            let budget = per_host(&config, bound);
            Box::new(move || dial_guarded(&config, tls.clone(), security, budget))
        };
        Connector { dial, options }
    }

    /// Connects, proves and sets up a session. Blocks for at most the query time-out, plus what
    /// name resolution takes.
    pub(crate) fn open(&self) -> Result<(Session, Findings), Error> {
        let end_by = Instant::now() + self.options.query_timeout;
        let mut session = self.hello(end_by)?;
        let outcome = self.prove(&mut session, end_by).and_then(|()| self.set_up(&mut session));
        match outcome {
            Ok(findings) => {
                session.end_by(None);
                Ok((session, findings))
            }
            Err(error) => {
                session.close();
                Err(self.as_connect_timeout(error))
            }
        }
    }

    /// What times out while a session is being opened is the opening.
    pub(super) fn as_connect_timeout(&self, error: Error) -> Error {
        match error {
            Error::Timeout(_) => Error::Timeout(Timeout::Connect(self.options.query_timeout)),
            other => other,
        }
    }

    /// Connects and learns who answers. Refuses standbys and servers that are too old.
    pub(super) fn hello(&self, end_by: Instant) -> Result<Session, Error> {
        let (client, guard) = (self.dial)().map_err(|error| self.as_connect_timeout(error))?;
        let mut session = Session::new(client, guard, self.options.query_timeout);
        session.end_by(Some(end_by));
        let facts = read_facts(&mut session).and_then(|facts| {
            if facts.version < OLDEST_SERVER {
                Err(Error::UnsupportedServer(facts.version))
            } else if facts.standby {
                Err(Error::NotPrimary)
            } else {
                Ok(facts)
            }
        });
        match facts {
            Ok(facts) => {
                session.facts = facts;
                Ok(session)
            }
            Err(error) => {
                session.close();
                Err(self.as_connect_timeout(error))
            }
        }
    }

    /// Proves that the endpoint keeps sessions apart.
    fn prove(&self, session: &mut Session, end_by: Instant) -> Result<(), Error> {
        for _ in 0..2 {
            let mut second = self.hello(end_by)?;
            let verdict = prove_apart(session, &mut second);
            if second.is_broken() {
                second.abandon()
            } else {
                second.close()
            }
            match verdict? {
                Verdict::Kept => return Ok(()),
                Verdict::Swapped => return Err(Error::TransactionPooling),
                Verdict::NoTransactions => {}
            }
        }
        Err(Error::TransactionPooling)
    }

    fn set_up(&self, session: &mut Session) -> Result<Findings, Error> {
        let mut findings = apply(session, &settings(&self.options))?;
        findings.missing.extend(check_connections(session)?);
        if self.options.listen {
            session.facts.beacon = light_beacon(session)?;
            session.notify_works = hear_myself(session)?;
        }
        Ok(findings)
    }
}

/// Our demands on the user's configuration.
fn prepare(config: &Config, options: &SessionOptions) -> Config {
    let mut config = config.clone();
    // The guard's hook is called for configurations with host names only.
    if config.get_hosts().is_empty() {
        for address in config.get_hostaddrs().to_vec() {
            config.host(&address.to_string());
        }
    }
    let name = options.application_name.as_deref();
    match (name, config.get_application_name()) {
        (Some(name), _) => config.application_name(name),
        (None, None) => config.application_name("leasehold"),
        (None, Some(_)) => &mut config,
    };
    let budget = per_host(&config, options.query_timeout);
    let wanted = config.get_connect_timeout().map_or(budget, |theirs| budget.min(*theirs));
    config.connect_timeout(wanted);
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(options.query_timeout);
    }
    if config.get_keepalives_interval().is_none() {
        let second = Duration::from_secs(1);
        config.keepalives(true);
        config.keepalives_idle(options.query_timeout.max(second));
        config.keepalives_interval((options.query_timeout / 3).max(second));
        config.keepalives_retries(3);
    }
    config
}

/// One frozen host must not use up the time of the others.
fn per_host(config: &Config, bound: Duration) -> Duration {
    let hosts = u32::try_from(config.get_hosts().len()).unwrap_or(u32::MAX).max(1);
    bound / hosts
}

fn dial_guarded<T>(
    config: &Config,
    tls: T,
    security: Security,
    budget: Duration,
) -> Result<Dialled, Error>
where
    T: MakeTlsConnect<Socket> + Send + 'static,
    T::TlsConnect: Send,
    T::Stream: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let made = Arc::new(Mutex::new(None::<Arc<Guard>>));
    let hook = Guarded { tls, security, budget, guard: Arc::clone(&made) };
    let mut config = config.clone();
    // Nothing is sent before our hook is called; the hook follows the user's `sslmode`.
    config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
    let result = config.connect(hook);
    let guard = made.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    match result {
        Ok(client) => {
            if let Some(guard) = &guard {
                guard.disarm();
            }
            Ok((client, guard))
        }
        Err(_) if guard.is_some_and(|guard| guard.is_dead()) => {
            Err(Error::Timeout(Timeout::Connect(budget)))
        }
        Err(error) => Err(Error::Connect(Arc::new(error))),
    }
}

fn read_facts(session: &mut Session) -> Result<Facts, Error> {
    let sql = statements::HELLO;
    let rows = session.query_once(sql, &[])?;
    let row = one(sql, &rows)?;
    Ok(Facts {
        pid: get(sql, row, 0)?,
        version: get(sql, row, 1)?,
        database: get(sql, row, 2)?,
        standby: get(sql, row, 3)?,
        timeline: timeline(sql, get(sql, row, 4)?)?,
        server_start: get(sql, row, 5)?,
        beacon: 0,
    })
}

pub(super) type Setting = (&'static str, String);

/// Every setting that our sessions depend on, so that no configuration of the server or the role
/// can end or bend them.
pub(super) fn settings(options: &SessionOptions) -> Vec<Setting> {
    let millis = |d: Duration| d.as_millis().max(1).to_string();
    // Rounded up: the server's TCP must not give up before the holder's own deadline.
    let seconds = |d: Duration| d.as_millis().div_ceil(1000).max(1).to_string();
    let vanished = options.vanished_after;
    let mut settings = vec![
        ("search_path", "pg_catalog, pg_temp".into()),
        ("statement_timeout", millis(options.query_timeout)),
        ("lock_timeout", options.lock_timeout.map_or("0".into(), millis)),
        ("transaction_timeout", "0".into()),
        ("idle_in_transaction_session_timeout", "0".into()),
        ("default_transaction_isolation", "read committed".into()),
        ("default_transaction_read_only", "off".into()),
        ("default_transaction_deferrable", "off".into()),
        // A token must survive a crash of the server; a standby's promotion starts a new timeline,
        // so waiting for standbys would add nothing.
        ("synchronous_commit", "local".into()),
        ("tcp_keepalives_idle", seconds(vanished / 2)),
        ("tcp_keepalives_interval", seconds(vanished / 6)),
        ("tcp_keepalives_count", "3".into()),
        ("tcp_user_timeout", millis(vanished)),
    ];
    settings.push(("idle_session_timeout", options.idle_timeout.map_or("0".into(), millis)));
    settings
}

/// Settings that end sessions or statements: replacing a value of the server's is worth telling.
const LIMITS: [&str; 5] = [
    "statement_timeout",
    "lock_timeout",
    "transaction_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
];

pub(super) fn apply(session: &mut Session, wanted: &[Setting]) -> Result<Findings, Error> {
    let sql = statements::SETTINGS;
    let names: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
    let values: Vec<&str> = wanted.iter().map(|(_, value)| value.as_str()).collect();
    let rows =
        session.query_once(sql, &[(&names, Type::TEXT_ARRAY), (&values, Type::TEXT_ARRAY)])?;
    let mut findings = Findings::default();
    let mut seen = Vec::new();
    for row in &rows {
        let (name, before): (String, String) = (get(sql, row, 0)?, get(sql, row, 1)?);
        let ours = wanted.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
        let ours = ours.ok_or(Error::Protocol(sql.name))?;
        if LIMITS.contains(&name.as_str()) && before != "0" && before != ours {
            findings.replaced.push((name.clone(), before, ours));
        }
        seen.push(name);
    }
    findings.missing = names.into_iter().filter(|name| !seen.iter().any(|s| s == name)).collect();
    Ok(findings)
}

/// Lets the server notice while a statement waits that its client is gone, where it can; gives the
/// setting's name if it cannot. Servers on some systems refuse every value.
fn check_connections(session: &mut Session) -> Result<Option<&'static str>, Error> {
    const SETTING: &str = "client_connection_check_interval";
    match apply(session, &[(SETTING, CONNECTION_CHECK.as_millis().to_string())]) {
        Ok(findings) if findings.missing.is_empty() => Ok(None),
        Ok(_) => Ok(Some(SETTING)),
        Err(_) if !session.is_broken() => Ok(Some(SETTING)),
        Err(error) => Err(error),
    }
}

/// Takes a beacon that nobody has.
fn light_beacon(session: &mut Session) -> Result<i32, Error> {
    let sql = statements::BEACON;
    for _ in 0..16 {
        let beacon = fastrand::i32(..);
        let params: [(&(dyn ToSql + Sync), Type); 2] =
            [(&super::BEACON_CLASS, Type::INT4), (&beacon, Type::INT4)];
        let rows = session.query_once(sql, &params)?;
        if get(sql, one(sql, &rows)?, 0)? {
            return Ok(beacon);
        }
    }
    Err(Error::Protocol(sql.name))
}

/// Subscribes, sends itself a message and waits for it: `LISTEN` through some proxies is accepted
/// and delivers nothing.
fn hear_myself(session: &mut Session) -> Result<bool, Error> {
    session.simple(statements::LISTEN)?;
    let probe = format!("p{:016x}", fastrand::u64(..));
    session.query_once(statements::NOTIFY, &[(&probe, Type::TEXT)])?;
    let end = Instant::now() + NOTIFY_BOUND.min(session.query_timeout);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if session.park(left)?.contains(&probe) {
            return Ok(true);
        }
        if left.is_zero() {
            return Ok(false);
        }
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests;
