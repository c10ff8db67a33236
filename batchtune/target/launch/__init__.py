"""With which words, threads and limits is a server started, and what is kept of what it says?"""
