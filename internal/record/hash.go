package record

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// ContentHash is what two records with the same (BranchKey, LSN) are compared by: SHA-256 over type, subject (absent is
// empty), occurred in decimal microseconds, destination, and data between its first and its last byte, each preceded by
// its length as 8 bytes big-endian. The destination of an event is empty, of a command it is toagent NUL torun NUL
// inputid, of a message its topic. A message's data counts whole.
func ContentHash(r *Record) [32]byte {
	var room [1024]byte
	b := appendSized(room[:0], r.Type)
	b = appendSized(b, r.Subject)
	var number [20]byte
	b = appendSized(b, strconv.AppendInt(number[:0], r.Occurred, 10))
	data := trimSpace(r.Data)
	switch r.Kind {
	case Command:
		b = binary.BigEndian.AppendUint64(b, uint64(len(r.ToAgent)+1+len(r.ToRun)+1+len(r.InputID)))
		b = append(append(b, r.ToAgent...), 0)
		b = append(append(b, r.ToRun...), 0)
		b = append(b, r.InputID...)
	case Message:
		b = appendSized(b, r.Topic)
		data = r.Data
	default:
		b = appendSized(b, "")
	}
	if len(data) == 0 && r.Kind != Message {
		data = null // as it travels
	}
	return sha256.Sum256(appendSized(b, data))
}

var null = []byte("null")

func appendSized[T string | []byte](b []byte, s T) []byte {
	return append(binary.BigEndian.AppendUint64(b, uint64(len(s))), s...)
}
