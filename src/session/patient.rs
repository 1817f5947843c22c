//! Cancel requests that wait for their end.
//!
//! The driver closes the connection of a cancel request as soon as it has written it. libpq reads
//! until the server closes, and that is what others rely on: PgBouncer 1.18 takes the early close
//! for a client that went away while it passes the request on, and aborts, with every connection
//! through it (`bad client state` in its log). So the stream of such a connection, when it is told
//! to shut down, reads to the end first; its guard bounds it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use postgres::Socket;
use postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Makes the connections of a TLS hook patient.
#[derive(Clone)]
pub(crate) struct Patient<T>(pub(crate) T);

/// [`Patient`] for one connection.
pub(crate) struct PatientConnect<C>(C);

/// See the head of this file.
pub(crate) struct PatientStream<S>(S);

impl<T> MakeTlsConnect<Socket> for Patient<T>
where
    T: MakeTlsConnect<Socket>,
    T::Stream: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send + 'static,
{
    type Stream = PatientStream<T::Stream>;
    type TlsConnect = PatientConnect<T::TlsConnect>;
    type Error = T::Error;

    fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, T::Error> {
        self.0.make_tls_connect(domain).map(PatientConnect)
    }
}

impl<C> TlsConnect<Socket> for PatientConnect<C>
where
    C: TlsConnect<Socket>,
    C::Future: Send + 'static,
{
    type Stream = PatientStream<C::Stream>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Stream, C::Error>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        let connect = self.0.connect(socket);
        Box::pin(async { connect.await.map(PatientStream) })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PatientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for PatientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut scratch = [0; 64];
        loop {
            let mut buf = ReadBuf::new(&mut scratch);
            let read = ready!(Pin::new(&mut self.0).poll_read(cx, &mut buf));
            if read.is_err() || buf.filled().is_empty() {
                // The server has closed, which is what was waited for.
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: TlsStream + Unpin> TlsStream for PatientStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.0.channel_binding()
    }
}
