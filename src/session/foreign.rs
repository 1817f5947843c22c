//! Sessions of a pool that the user has: as the user made them, neither guarded nor proved.

use std::sync::Arc;
use std::time::Duration;

use postgres::tls::{MakeTlsConnect, TlsConnect};
use postgres::{Client, Socket};
use r2d2_postgres::PostgresConnectionManager;

use super::lock_statements as sql;
use super::pinned::Pinned;
use super::pool::{Got, Source, wait_for};
use crate::error::Error;

/// A client of the user's pool, whatever its TLS.
pub(crate) trait Foreign: Send {
    fn client(&mut self) -> &mut Client;
}

impl<T> Foreign for r2d2::PooledConnection<PostgresConnectionManager<T>>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send,
    T::Stream: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn client(&mut self) -> &mut Client {
        self
    }
}

/// A pool that the user has.
pub(crate) struct UserPool<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send,
    T::Stream: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    pub(crate) pool: r2d2::Pool<PostgresConnectionManager<T>>,
}

impl<T> Source for UserPool<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send,
    T::Stream: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn get(&self, wait: Option<Duration>, patience: Duration, stop: &dyn Fn() -> bool) -> Got {
        // r2d2 adds the reason to its text if connecting failed, and says so in no other way.
        let failure = |error: r2d2::Error| {
            error.to_string().contains(": ").then(|| Error::Pool(Arc::new(error)))
        };
        match wait_for(&self.pool, (wait, patience), stop, &failure) {
            Ok(connection) => Got::Session(Pinned::foreign(connection)),
            Err(None) => Got::Busy,
            Err(Some(error)) => Got::Failed(error),
        }
    }

    fn size(&self) -> u32 {
        self.pool.max_size()
    }

    fn is_guarded(&self) -> bool {
        false
    }
}

/// How often, and how long each time, an ended session is read until its end is seen.
const LOOKS: usize = 10;
const LOOK: Duration = Duration::from_millis(100);

/// r2d2 takes no connection out of a pool, and its manager for PostgreSQL keeps all but closed
/// ones: so the session is asked to end itself. May block as long as the server is silent.
pub(super) fn end(mut foreign: Box<dyn Foreign>) {
    let client = foreign.client();
    if !client.is_closed() && client.simple_query(sql::LOCK_TERMINATE.text).is_ok() {
        log::debug!(target: "leasehold", "a session outlived its end");
    }
    for _ in 0..LOOKS {
        // The farewell comes before the close, which the client finds when it reads again.
        if client.is_closed() || (client.is_valid(LOOK).is_err() && client.is_closed()) {
            return;
        }
    }
    log::error!(target: "leasehold", "a session in doubt is kept out of its pool, with its place");
    std::mem::forget(foreign);
}
