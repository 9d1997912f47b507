package answer

import "encoding/binary"

// bodyStart is how much of a message's body is kept to look at: the counts of columns, the word of a command tag, the severity of an error.
const bodyStart = 32

// frames finds the messages in a stream of bytes, in whatever pieces it comes.
type frames struct {
	header  [5]byte
	nheader int
	start   [bodyStart]byte
	nstart  int
	left    int // of the body
}

// next takes bytes up to the point where a message can be judged, its header and the start of its body having been seen, or to the end of p. It
// returns how many it took, and the message's type, 0 if there is none yet. What is left of the body is passed over by the next call.
func (f *frames) next(p []byte) (n int, typ byte) {
	if f.nheader < len(f.header) {
		if f.left > 0 { // of the message before
			n = min(f.left, len(p))
			if f.left -= n; f.left > 0 {
				return n, 0
			}
		}
		c := copy(f.header[f.nheader:], p[n:])
		f.nheader += c
		n += c
		if f.nheader < len(f.header) {
			return n, 0
		}
		f.nstart, f.left = 0, max(int(int32(binary.BigEndian.Uint32(f.header[1:])))-4, 0) //nolint:gosec // the protocol's own type
	}
	want := min(bodyStart-f.nstart, f.left)
	c := copy(f.start[f.nstart:f.nstart+want], p[n:])
	f.nstart += c
	f.left -= c
	n += c
	if c < want {
		return n, 0
	}
	f.nheader = 0
	return n, f.header[0]
}

// body is what is known of the body of the message that next returned.
func (f *frames) body() []byte { return f.start[:f.nstart] }

// whole reports whether that is all of it.
func (f *frames) whole() bool { return f.left == 0 }
