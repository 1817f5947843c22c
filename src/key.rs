//! Names become advisory-lock keys here, and nowhere else.

use std::fmt;

/// The namespace of lease keys: the bytes of `leas`, read as an integer.
///
/// It is not 0, so that a lease and a lock of module `lock` with one name do not meet.
/// [`Options::namespace`](crate::Options::namespace) replaces it.
pub const LEASE_NAMESPACE: i32 = i32::from_be_bytes(*b"leas");

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

/// The advisory-lock key of a name: 64 bits, the single-`bigint` form of PostgreSQL's
/// [advisory lock functions].
///
/// # Design
///
/// A key is the FNV-1a hash, 64 bits wide, of the namespace as four big-endian bytes followed by
/// the bytes of the name in UTF-8. It does not depend on the host, the process or the version of
/// this crate; programs in other languages that hash this way contend for the same lock. Among
/// 10^6 names the chance of any collision is 3 in 10^8; two names with one key on one
/// [`Locker`](crate::Locker) are refused with [`Error::KeyCollision`](crate::Error::KeyCollision).
///
/// The same hash as SQL, with `$1` the namespace and `$2` the name:
///
/// ```sql
#[doc = include_str!("key.sql")]
/// ```
///
/// # Examples
///
/// ```
/// use leasehold::Key;
///
/// assert_eq!(Key::new(0, "chore").as_i64(), -9101024336111071950);
/// assert_eq!(leasehold::key("chore"), Key::new(leasehold::LEASE_NAMESPACE, "chore").as_i64());
/// ```
///
/// [advisory lock functions]: https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(i64);

impl Key {
    /// The key of `name` in `namespace`.
    #[must_use]
    pub fn new(namespace: i32, name: &str) -> Key {
        let bytes = namespace.to_be_bytes().into_iter().chain(name.bytes());
        let hash =
            bytes.fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
        Key(i64::from_ne_bytes(hash.to_ne_bytes()))
    }

    /// The key that is `value` on the server.
    #[must_use]
    pub const fn from_i64(value: i64) -> Key {
        Key(value)
    }

    /// The value that the server's advisory lock functions take.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.0)
    }
}

/// The key of the lease `name` in the default namespace, [`LEASE_NAMESPACE`]: what to look for in
/// `pg_locks`, where it is shown as `classid` (the upper 32 bits) and `objid` (the lower).
#[must_use]
pub fn key(name: &str) -> i64 {
    Key::new(LEASE_NAMESPACE, name).as_i64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Golden values, shared with programs in other languages: they must never change.
    const GOLDEN: [(i32, &str, i64); 8] = [
        (0, "k", -1964703200901900934),
        (1, "k", -1965591606297306197),
        (-1, "k", -6034990589370483314),
        (7, "k", -1971185921460508415),
        (i32::MIN, "k", 4336278249100314362),
        (0, "chore", -9101024336111071950),
        (42, "nightly-compaction", -7562691884079179178),
        (0, "日本", -8964309651031787423),
    ];

    #[test]
    fn golden_values_hold() {
        for (namespace, name, key) in GOLDEN {
            assert_eq!(Key::new(namespace, name).as_i64(), key, "({namespace}, {name:?})");
        }
    }

    #[test]
    fn a_million_names_do_not_collide() {
        let keys: HashSet<Key> =
            (0..1_000_000).map(|i| Key::new(LEASE_NAMESPACE, &format!("tenant-{i}"))).collect();
        assert_eq!(keys.len(), 1_000_000);
    }

    #[test]
    fn the_lease_namespace_is_fixed() {
        assert_eq!(LEASE_NAMESPACE, 1_818_583_411);
        assert_ne!(key("k"), Key::new(0, "k").as_i64());
    }
}
