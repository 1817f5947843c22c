//! The stream under the driver: it cannot hang, and another thread can wake it.
//!
//! The driver bounds nothing by itself: a query to a frozen server, or a start-up message to a
//! frozen postmaster, waits for ever, and so does the drop of a client. The driver's TLS hook is
//! the one place where it hands out the raw socket before anything was sent, when it is told to
//! require TLS with direct negotiation. So every connection goes through that hook, in
//! [`super::tls`], which returns the stream inside [`GuardedStream`]: it polls a [`Guard`] with each
//! read and write.
//!
//! # Protocol of a guard
//!
//! - Its owner *arms* it with a deadline before each statement, and *disarms* it after. A deadline
//!   that passes makes the stream fail, now and for ever; the driver then lets go of the socket
//!   without waiting for the server.
//! - Any thread may *kill* it, with the same effect at once.
//! - Any thread may *wake* an owner that is parked in the driver, waiting for a notification: the
//!   stream then reads as if the server had sent a notification on the channel [`WAKE_CHANNEL`],
//!   from process 0, which no server sends. It is slipped in only between two messages of the
//!   server, so the stream follows their framing. Measured, this costs 10 to 20 us and nothing
//!   while idle, where polling would cost a wake-up per slice and delay what arrives by as much.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker, ready};

use postgres::tls::{ChannelBinding, TlsStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// The channel of the notification that only means "look at your requests".
pub(crate) const WAKE_CHANNEL: &str = "leasehold-wake";

/// `NotificationResponse`: type, length, process 0, channel, empty payload.
const WAKE_MESSAGE: &[u8] = b"A\0\0\0\x18\0\0\0\0leasehold-wake\0\0";

#[derive(Debug, Default)]
struct State {
    deadline: Option<Instant>,
    dead: bool,
    wake: bool,
    waker: Option<Waker>,
}

/// Bounds one connection; see the head of this file for its protocol.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    state: Mutex<State>,
}

impl Guard {
    pub(crate) fn armed(deadline: Instant) -> Guard {
        let state = State { deadline: Some(deadline), ..State::default() };
        Guard { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn arm(&self, deadline: std::time::Instant) {
        self.lock().deadline = Some(deadline.into());
    }

    pub(crate) fn disarm(&self) {
        self.lock().deadline = None;
    }

    pub(crate) fn kill(&self) {
        let mut state = self.lock();
        state.dead = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.lock().dead
    }

    pub(crate) fn wake(&self) {
        let mut state = self.lock();
        state.wake = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes back a wake-up that was not delivered.
    pub(crate) fn unwake(&self) {
        self.lock().wake = false;
    }
}

pub(crate) fn expired() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer within the deadline")
}

/// Follows the server's messages (a type byte, a length that counts itself, a body) to know when
/// the stream stands between two of them.
#[derive(Debug, Default)]
struct Framing {
    header: [u8; 5],
    have: usize,
    body: usize,
}

impl Framing {
    fn between_messages(&self) -> bool {
        self.have == 0 && self.body == 0
    }

    fn advance(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.body > 0 {
                let n = self.body.min(bytes.len());
                self.body -= n;
                bytes = &bytes[n..];
                continue;
            }
            let n = (self.header.len() - self.have).min(bytes.len());
            self.header[self.have..self.have + n].copy_from_slice(&bytes[..n]);
            self.have += n;
            bytes = &bytes[n..];
            if self.have == self.header.len() {
                let [_, length @ ..] = self.header;
                self.body = (u32::from_be_bytes(length) as usize).saturating_sub(4);
                self.have = 0;
            }
        }
    }
}

/// A stream whose reads and writes end when its [`Guard`] says so.
pub(crate) struct GuardedStream<S> {
    inner: S,
    guard: Arc<Guard>,
    framing: Framing,
    /// How much of a wake-up message has been read; 0 if none is being read.
    waking: usize,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<S> GuardedStream<S> {
    /// `inner`, at the start of a server message.
    pub(crate) fn new(inner: S, guard: Arc<Guard>) -> GuardedStream<S> {
        GuardedStream { inner, guard, framing: Framing::default(), waking: 0, timer: None }
    }

    /// Fails if the guard is dead or its deadline has passed; otherwise sees to it that the task is
    /// polled again when one of them happens.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let mut state = self.guard.lock();
        if state.dead {
            return Err(expired());
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        let Some(deadline) = state.deadline else {
            self.timer = None;
            return Ok(());
        };
        let (at, sleep) = self
            .timer
            .get_or_insert_with(|| (deadline, Box::pin(tokio::time::sleep_until(deadline))));
        if *at != deadline {
            *at = deadline;
            sleep.as_mut().reset(deadline);
        }
        if sleep.as_mut().poll(cx).is_ready() {
            state.dead = true;
            return Err(expired());
        }
        Ok(())
    }

    /// Writes the wake-up message into `buf` if one is due here; as much of it as fits, since the
    /// driver may have room for a few bytes only, and the rest with the next read.
    fn slip_in_wake(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        if self.waking == 0 {
            let due =
                self.framing.between_messages() && std::mem::take(&mut self.guard.lock().wake);
            if !due {
                return false;
            }
        }
        let rest = &WAKE_MESSAGE[self.waking..];
        let n = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..n]);
        self.waking = (self.waking + n) % WAKE_MESSAGE.len();
        n > 0
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for GuardedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        if self.slip_in_wake(buf) {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        self.framing.advance(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuardedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

impl<S: TlsStream + Unpin> TlsStream for GuardedStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.inner.channel_binding()
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;

    /// Two messages and the start of a third: `T` with 4 bytes of body, `Z` with none, `D`.
    const MESSAGES: &[u8] = b"T\0\0\0\x08abcdZ\0\0\0\x04D\0\0";

    #[test]
    fn framing_knows_the_gaps_however_the_bytes_are_cut() {
        for chunk in 1..=MESSAGES.len() {
            let mut framing = Framing::default();
            let mut seen = 0;
            for bytes in MESSAGES.chunks(chunk) {
                framing.advance(bytes);
                seen += bytes.len();
                let gap = [9, 14].contains(&seen);
                assert_eq!(framing.between_messages(), gap, "after {seen} in chunks of {chunk}");
            }
        }
    }

    #[test]
    fn the_wake_message_is_one_whole_message() {
        let mut framing = Framing::default();
        framing.advance(WAKE_MESSAGE);
        assert!(framing.between_messages());
        assert_eq!(&WAKE_MESSAGE[9..WAKE_MESSAGE.len() - 2], WAKE_CHANNEL.as_bytes());
    }

    /// A stream that has a server message and a half to read, and then nothing.
    struct Half(&'static [u8]);

    impl AsyncRead for Half {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.0.is_empty() {
                return Poll::Pending;
            }
            let (now, later) = self.0.split_at(self.0.len().min(buf.remaining()));
            buf.put_slice(now);
            self.0 = later;
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn a_wake_up_comes_between_messages_and_whole_however_little_room_there_is() {
        for room in 1..=40 {
            let guard = Arc::new(Guard::default());
            let mut stream = GuardedStream::new(Half(&MESSAGES[..14]), Arc::clone(&guard));
            let mut context = Context::from_waker(Waker::noop());
            let mut read = Vec::new();
            let mut poll = |stream: &mut GuardedStream<Half>| {
                let mut bytes = vec![0; room];
                let mut buf = ReadBuf::new(&mut bytes);
                let ready = Pin::new(stream).poll_read(&mut context, &mut buf).is_ready();
                read.extend_from_slice(buf.filled());
                ready
            };
            poll(&mut stream);
            guard.wake();
            while poll(&mut stream) {}
            let at = read.windows(WAKE_MESSAGE.len()).position(|bytes| bytes == WAKE_MESSAGE);
            let at = at.unwrap_or_else(|| panic!("not woken with room for {room}: {read:?}"));
            assert!([0, 9, 14].contains(&at), "at {at} with room for {room}");
            read.drain(at..at + WAKE_MESSAGE.len());
            assert_eq!(read, &MESSAGES[..14]);
        }
    }
}
