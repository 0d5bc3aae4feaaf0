//! Bounded reading and writing of little-endian fields; never past the end, never a panic (I9).

use super::fault::Fault;

/// Takes fields from the front of a byte string.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The next `n` bytes.
    ///
    /// # Errors
    /// [`Fault::Malformed`] when fewer are left; so in every reading function here.
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], Fault> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or(Fault::Malformed("payload is too short"))?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes as an array.
    ///
    /// # Errors
    /// See [`Self::bytes`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(Fault::Malformed("payload is too short"))?;
        self.rest = rest;
        Ok(*head)
    }

    /// One byte.
    ///
    /// # Errors
    /// See [`Self::bytes`].
    pub fn u8(&mut self) -> Result<u8, Fault> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// Two bytes.
    ///
    /// # Errors
    /// See [`Self::bytes`].
    pub fn u16(&mut self) -> Result<u16, Fault> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes.
    ///
    /// # Errors
    /// See [`Self::bytes`].
    pub fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    ///
    /// # Errors
    /// See [`Self::bytes`].
    pub fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A string: its length in two bytes, then as many bytes of UTF-8 without control characters.
    ///
    /// # Errors
    /// [`Fault::Malformed`] also when it is longer than `most` bytes or not such a string.
    pub fn text(&mut self, most: usize) -> Result<&'a str, Fault> {
        let length = usize::from(self.u16()?);
        if length > most {
            return Err(Fault::Malformed("a string is too long"));
        }
        printable(self.bytes(length)?)
    }

    /// `n` bytes that must be zero.
    ///
    /// # Errors
    /// [`Fault::Malformed`] also when one of them is not.
    pub fn zeros(&mut self, n: usize) -> Result<(), Fault> {
        match self.bytes(n)?.iter().all(|&b| b == 0) {
            true => Ok(()),
            false => Err(Fault::Malformed("reserved bytes aren't zero")),
        }
    }

    /// Declares the end.
    ///
    /// # Errors
    /// [`Fault::Malformed`] when bytes are left.
    pub fn end(self) -> Result<(), Fault> {
        match self.rest.is_empty() {
            true => Ok(()),
            false => Err(Fault::Malformed("payload is too long")),
        }
    }
}

/// Bytes as UTF-8 without control characters: names and texts end up in logs and on terminals.
pub(super) fn printable(bytes: &[u8]) -> Result<&str, Fault> {
    let text = core::str::from_utf8(bytes).map_err(|_| Fault::Malformed("a string isn't UTF-8"))?;
    match text.chars().any(char::is_control) {
        true => Err(Fault::Malformed("a string has control characters")),
        false => Ok(text),
    }
}

/// Appends fields to a buffer that the caller made large enough.
///
/// What doesn't fit is dropped and remembered, so that [`Writer::finish`] can say so: encoding is for
/// values of our own, whose sizes are bounded by types and by the builders of the frames.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
    overflow: bool,
}

impl<'a> Writer<'a> {
    /// Writes from the start of `out`.
    #[must_use]
    pub fn new(out: &'a mut [u8]) -> Self {
        Self { out, at: 0, overflow: false }
    }

    /// Appends bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        match self.out.get_mut(self.at..self.at.saturating_add(bytes.len())) {
            Some(room) => {
                room.copy_from_slice(bytes);
                self.at += bytes.len();
            }
            None => self.overflow = true,
        }
    }

    /// Appends one byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends two bytes.
    pub fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends four bytes.
    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends a string as [`Reader::text`] reads it, cut to `most` bytes at a character's border;
    /// control characters become spaces.
    pub fn text(&mut self, text: &str, most: usize) {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = &text[..end];
        self.u16(u16::try_from(text.len()).unwrap_or(0));
        for c in text.chars() {
            let mut utf8 = [0; 4];
            // A control character outside ASCII takes two bytes, as many as the no-break space put for it.
            let c = if !c.is_control() {
                c
            } else if c.len_utf8() == 1 {
                ' '
            } else {
                '\u{a0}'
            };
            self.bytes(c.encode_utf8(&mut utf8).as_bytes());
        }
    }

    /// Appends `n` zeros.
    pub fn zeros(&mut self, n: usize) {
        for _ in 0..n {
            self.u8(0);
        }
    }

    /// The number of bytes written, or nothing if they didn't fit.
    #[must_use]
    pub fn finish(self) -> Option<usize> {
        (!self.overflow).then_some(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_is_cut_at_a_character_and_cleaned() {
        let mut out = [0; 32];
        let mut w = Writer::new(&mut out);
        w.text("a\n\u{85}é", 5);
        let n = w.finish().unwrap();
        assert_eq!(Reader::new(&out[..n]).text(5), Ok("a \u{a0}"));
    }

    #[test]
    fn a_writer_that_is_full_says_so() {
        let mut out = [0; 3];
        let mut w = Writer::new(&mut out);
        w.u32(1);
        assert_eq!(w.finish(), None);
    }
}
