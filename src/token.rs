//! Fencing tokens: numbers that only grow from one term of a name to the next.

use std::fmt;
use std::str::FromStr;

/// Bits of a token below the timeline: room for 281 trillion transactions.
const XID_BITS: u32 = 48;
const MAX_XID: u64 = (1 << XID_BITS) - 1;
/// The sign bit stays clear, so that `bigint` columns order tokens as Rust does.
const MAX_TIMELINE: u32 = (1 << (63 - XID_BITS)) - 1;

/// Proof of a term's age: every later term of the same name has a greater token.
///
/// Write it beside what the job changes and let the resource refuse a smaller one, and a former
/// leader that has not noticed its loss can do no harm:
///
/// ```sql
/// UPDATE account SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2
/// ```
///
/// No row updated means: this term is over. Any store with compare-and-set can do the same.
///
/// # Design
///
/// A token is the server's timeline in the upper bits and a 64-bit transaction id below it, read
/// after the lock was granted. Transaction ids grow while the server lives, and across a crash
/// because the transaction that took the token was flushed; each promotion of a standby starts a
/// greater timeline. [`as_i64`](FencingToken::as_i64) packs them as
/// `timeline * 2^48 + transaction id`: positive, ordered as the token is, good for 32,767
/// promotions and 2.8 * 10^14 transactions (892 years at 10,000 a second). A server beyond these
/// gets [`Error::TokenExhausted`](crate::Error::TokenExhausted) instead of a term.
///
/// Tokens of different databases do not compare.
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FencingToken(i64);

impl FencingToken {
    /// The token of `timeline` and 64-bit transaction id `xid`; `None` beyond the packing's limits,
    /// and for 0, which no server hands out.
    pub(crate) fn new(timeline: u32, xid: u64) -> Option<FencingToken> {
        if timeline == 0 || timeline > MAX_TIMELINE || xid == 0 || xid > MAX_XID {
            return None;
        }
        i64::try_from((u64::from(timeline) << XID_BITS) | xid).ok().map(FencingToken)
    }

    /// The token as a positive number for a `bigint` column.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.0
    }

    /// The token as an unsigned number: the same value as [`as_i64`](FencingToken::as_i64).
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0.unsigned_abs()
    }

    /// The server's timeline: one more after each promotion of a standby.
    #[must_use]
    pub const fn timeline(self) -> u32 {
        (self.as_u64() >> XID_BITS) as u32
    }

    /// The 64-bit transaction id under which the term began.
    #[must_use]
    pub const fn transaction_id(self) -> u64 {
        self.as_u64() & MAX_XID
    }
}

/// `timeline-transaction`, as in `1-738211`: what [`FromStr`] reads.
impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.timeline(), self.transaction_id())
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FencingToken({self})")
    }
}

/// A text or number that is no [`FencingToken`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a fencing token: expected `timeline-transaction`, as in `1-738211`, in range")]
pub struct ParseTokenError;

impl FromStr for FencingToken {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<FencingToken, ParseTokenError> {
        let (timeline, xid) = text.split_once('-').ok_or(ParseTokenError)?;
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        if !digits(timeline) || !digits(xid) {
            return Err(ParseTokenError);
        }
        let timeline = timeline.parse().map_err(|_| ParseTokenError)?;
        let xid = xid.parse().map_err(|_| ParseTokenError)?;
        FencingToken::new(timeline, xid).ok_or(ParseTokenError)
    }
}

/// Reads back what [`as_i64`](FencingToken::as_i64) wrote.
impl TryFrom<i64> for FencingToken {
    type Error = ParseTokenError;

    fn try_from(value: i64) -> Result<FencingToken, ParseTokenError> {
        let raw = u64::try_from(value).map_err(|_| ParseTokenError)?;
        let timeline = u32::try_from(raw >> XID_BITS).map_err(|_| ParseTokenError)?;
        FencingToken::new(timeline, raw & MAX_XID).ok_or(ParseTokenError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_timeline_beats_any_transaction_id() {
        let old = FencingToken::new(1, MAX_XID).unwrap();
        let new = FencingToken::new(2, 1).unwrap();
        assert!(new > old && new.as_i64() > old.as_i64() && new.as_u64() > old.as_u64());
    }

    #[test]
    fn the_packing_is_what_the_documentation_says() {
        let token = FencingToken::new(3, 738_211).unwrap();
        assert_eq!(token.as_i64(), 3 * (1 << 48) + 738_211);
        assert_eq!((token.timeline(), token.transaction_id()), (3, 738_211));
        assert_eq!(FencingToken::new(MAX_TIMELINE, MAX_XID).unwrap().as_i64(), i64::MAX);
    }

    #[test]
    fn values_beyond_the_limits_are_refused_not_wrapped() {
        for (timeline, xid) in [(MAX_TIMELINE + 1, 1), (1, MAX_XID + 1), (0, 1), (1, 0)] {
            assert_eq!(FencingToken::new(timeline, xid), None);
        }
        assert!(FencingToken::try_from(-1).is_err());
        assert!(FencingToken::try_from(5).is_err());
    }

    #[test]
    fn text_and_number_round_trip() {
        let token = FencingToken::new(7, 42).unwrap();
        assert_eq!(token.to_string(), "7-42");
        assert_eq!("7-42".parse(), Ok(token));
        assert_eq!(FencingToken::try_from(token.as_i64()), Ok(token));
        for bad in ["", "7", "7-", "-42", "7-42-1", "+7-42", "7-+42", "0-1", "a-b", "99999-1"] {
            assert_eq!(bad.parse::<FencingToken>(), Err(ParseTokenError), "{bad:?}");
        }
    }
}
