//! TLS, or none, under a guard: the driver's TLS hook.
//!
//! The driver is told to require TLS with direct negotiation, so it sends nothing before this hook
//! has the socket. The hook then does what the user's `sslmode` says, all of it within the budget:
//! asks the server for TLS, runs the handshake of the user's connector, or leaves the stream plain.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use postgres::Socket;
use postgres::config::{SslMode, SslNegotiation};
use postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::transport::{Guard, GuardedStream, expired};

/// `SSLRequest`: length and code.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];

/// A connection with TLS or without.
pub(crate) enum MaybeTls<S> {
    Plain(Socket),
    Tls(S),
}

macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            MaybeTls::Plain($stream) => $call,
            MaybeTls::Tls($stream) => $call,
        }
    };
}

impl<S: AsyncRead + Unpin> AsyncRead for MaybeTls<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MaybeTls<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

impl<S: TlsStream + Unpin> TlsStream for MaybeTls<S> {
    fn channel_binding(&self) -> ChannelBinding {
        match self {
            MaybeTls::Plain(_) => ChannelBinding::none(),
            MaybeTls::Tls(stream) => stream.channel_binding(),
        }
    }
}

/// How a connection is to be secured, as the user's configuration says.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Security {
    pub(crate) mode: SslMode,
    pub(crate) negotiation: SslNegotiation,
}

/// The driver's TLS hook: makes each connection a guarded one, with the user's TLS inside.
#[derive(Clone)]
pub(crate) struct Guarded<T> {
    pub(crate) tls: T,
    pub(crate) security: Security,
    /// For TLS negotiation, start-up and authentication of one host.
    pub(crate) budget: Duration,
    /// The guard of the connection made last.
    pub(crate) guard: Arc<Mutex<Option<Arc<Guard>>>>,
}

/// [`Guarded`] for one connection.
pub(crate) struct GuardedConnect<C> {
    tls: C,
    security: Security,
    guard: Arc<Guard>,
    deadline: Instant,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl<T> MakeTlsConnect<Socket> for Guarded<T>
where
    T: MakeTlsConnect<Socket>,
    T::TlsConnect: Send + 'static,
    T::Stream: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    type Stream = GuardedStream<MaybeTls<T::Stream>>;
    type TlsConnect = GuardedConnect<T::TlsConnect>;
    type Error = BoxError;

    fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, BoxError> {
        let tls = self.tls.make_tls_connect(domain).map_err(Into::into)?;
        let deadline = Instant::now() + self.budget;
        let guard = Arc::new(Guard::armed(deadline));
        *self.guard.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            Some(Arc::clone(&guard));
        Ok(GuardedConnect { tls, security: self.security, guard, deadline })
    }
}

impl<C> TlsConnect<Socket> for GuardedConnect<C>
where
    C: TlsConnect<Socket> + Send + 'static,
    C::Future: Send,
    C::Stream: Send,
{
    type Stream = GuardedStream<MaybeTls<C::Stream>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Stream, BoxError>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        let GuardedConnect { tls, security, guard, deadline } = self;
        Box::pin(async move {
            let secured = tokio::time::timeout_at(deadline, secure(tls, security, socket)).await;
            let inner = secured.map_err(|_| {
                guard.kill();
                expired()
            })??;
            Ok(GuardedStream::new(inner, guard))
        })
    }
}

/// Negotiates TLS as libpq does for this `sslmode`.
async fn secure<C: TlsConnect<Socket>>(
    tls: C,
    security: Security,
    mut socket: Socket,
) -> Result<MaybeTls<C::Stream>, BoxError> {
    if security.mode == SslMode::Disable {
        return Ok(MaybeTls::Plain(socket));
    }
    if security.negotiation == SslNegotiation::Postgres {
        let offered = offers_tls(&mut socket).await?;
        if !offered && security.mode == SslMode::Prefer {
            return Ok(MaybeTls::Plain(socket));
        }
        if !offered {
            return Err("the server does not offer TLS, and sslmode=require".into());
        }
    }
    tls.connect(socket).await.map(MaybeTls::Tls).map_err(Into::into)
}

/// Asks the server for TLS. Reads one byte only: what follows belongs to the handshake.
async fn offers_tls(socket: &mut Socket) -> io::Result<bool> {
    let mut sent = 0;
    while sent < SSL_REQUEST.len() {
        sent += poll_fn(|cx| Pin::new(&mut *socket).poll_write(cx, &SSL_REQUEST[sent..])).await?;
    }
    poll_fn(|cx| Pin::new(&mut *socket).poll_flush(cx)).await?;
    let mut answer = [0; 1];
    let mut buf = ReadBuf::new(&mut answer);
    poll_fn(|cx| Pin::new(&mut *socket).poll_read(cx, &mut buf)).await?;
    match buf.filled() {
        [b'S'] => Ok(true),
        [b'N' | b'E'] => Ok(false),
        [] => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a PostgreSQL server")),
    }
}
