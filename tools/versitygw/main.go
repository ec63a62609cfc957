// Versitygw over a directory, and nothing else: its own command also has the clients of Azure, S3
// and IAM, and its own tests, which take half of the time to build it.
package main

import (
	"context"
	"log"
	"os"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

// usage: versitygw HOST:PORT DIRECTORY ATTRIBUTES
//
// Each folder in DIRECTORY is a bucket. What S3 keeps beside the bytes of an object is in
// ATTRIBUTES, since not every file system has extended attributes.
func main() {
	attributes, err := meta.NewSideCar(os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	store, err := posix.New(os.Args[2], attributes, posix.PosixOpts{SideCarDir: os.Args[3]})
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(embedgw.RunVersityGW(context.Background(), store, &embedgw.Config{
		RootUserAccess:    os.Getenv("ROOT_ACCESS_KEY"),
		RootUserSecret:    os.Getenv("ROOT_SECRET_KEY"),
		Region:            os.Getenv("AWS_REGION"),
		Ports:             []string{os.Args[1]},
		MaxConnections:    1000,
		MaxRequests:       1000,
		MultipartMaxParts: 10000,
		KeepAlive:         true,
		Quiet:             true,
	}))
}
